//! Conversion of PyTorch's pickled weights to safetensors. Candle's pickle reader takes the pickle apart as data;
//! nothing that it says is ever run.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

use candle_core::Tensor;
use candle_core::pickle::{Object, PthTensors, Stack, TensorInfo};
use zip::ZipArchive;

use crate::config::read_json;
use crate::error::{Error, Problems, Result, catching_panics};

/// What a conversion wrote.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Converted {
    /// The files, the index last where there is one.
    pub files: Vec<PathBuf>,
    /// Tensors in them.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub size_bytes: usize,
}

/// Converts `pytorch_model.bin`, or every shard that a `pytorch_model.bin.index.json` names, to safetensors in
/// `target_dir`. A file appears there whole or not at all.
///
/// # Errors
/// [`Error::Model`] for a file that is damaged or that holds anything but tensors; [`Error::Input`] when the target
/// holds such weights already.
pub fn convert_pickle(source: &Path, target_dir: &Path) -> Result<Converted> {
    for name in ["model.safetensors", "model.safetensors.index.json"] {
        let there = target_dir.join(name);
        if there.exists() {
            return Err(Error::input(format!("target has weights already: `{}`", there.display()))
                .with_hint("remove them, or give another folder"));
        }
    }
    fs::create_dir_all(target_dir).map_err(|error| writing_failed(target_dir, &error))?;
    let mut converted = Converted::default();
    if source.extension().is_some_and(|extension| extension == "json") {
        convert_index(source, target_dir, &mut converted)?;
    } else {
        convert_file(source, &target_dir.join("model.safetensors"), &mut converted)?;
    }
    Ok(converted)
}

/// Converts every shard, then writes the index that makes them one model.
fn convert_index(source: &Path, target_dir: &Path, converted: &mut Converted) -> Result<()> {
    let index = read_json(source)?;
    let no_map = || Error::file(source, "index has no weight_map of file names");
    let map = index.get("weight_map").and_then(|map| map.as_object()).ok_or_else(no_map)?;
    let shards: Option<BTreeSet<&str>> = map.values().map(|shard| shard.as_str()).collect();
    let mut weight_map = BTreeMap::new();
    for shard in shards.filter(|shards| !shards.is_empty()).ok_or_else(no_map)? {
        let stem = shard.strip_suffix(".bin").filter(|stem| !stem.contains(['/', '\\'])).ok_or_else(no_map)?;
        let target = format!("{}.safetensors", stem.replacen("pytorch_model", "model", 1));
        let folder = source.parent().unwrap_or(Path::new(""));
        for name in convert_file(&folder.join(shard), &target_dir.join(&target), converted)? {
            weight_map.insert(name, target.clone());
        }
    }
    let index = serde_json::json!({"metadata": {"total_size": converted.size_bytes}, "weight_map": weight_map});
    let target = target_dir.join("model.safetensors.index.json");
    write_whole(&target, |path| fs::write(path, format!("{index:#}\n")).map_err(|error| writing_failed(path, &error)))?;
    converted.files.push(target);
    Ok(())
}

/// Converts one file; gives the names of its tensors.
fn convert_file(source: &Path, target: &Path, converted: &mut Converted) -> Result<Vec<String>> {
    // Candle's reader takes some things for granted that a damaged pickle may lack.
    let names = catching_panics(|| tensor_names(source)).map_err(|error| match error {
        Error::Internal { message, .. } => Error::file(source, format!("pickled weights are damaged ({message})")),
        other => other,
    })?;
    let damaged = |error: candle_core::Error| Error::file(source, format!("pickled weights cannot be read ({error})"));
    let pickled = PthTensors::new(source, None).map_err(damaged)?;
    let mut tensors: Vec<(&str, Tensor)> = Vec::with_capacity(names.len());
    for name in &names {
        let tensor = pickled.get(name).and_then(|tensor| tensor.map(|tensor| tensor.contiguous()).transpose());
        match tensor.map_err(damaged)? {
            Some(tensor) => tensors.push((name, tensor)),
            None => return Err(Error::file(source, format!("pickled weights lack a tensor that they list ({name})"))),
        }
    }
    converted.tensors += tensors.len();
    converted.size_bytes +=
        tensors.iter().map(|(_, tensor)| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum::<usize>();
    write_whole(target, |path| {
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        safetensors::serialize_to_file(tensors, Some(metadata), path).map_err(|error| writing_failed(path, &error))
    })?;
    converted.files.push(target.to_owned());
    Ok(names)
}

/// The names of the tensors in a file, each of which is known to fit the archive that holds it.
fn tensor_names(source: &Path) -> Result<Vec<String>> {
    let damaged = |error: &dyn std::fmt::Display| Error::file(source, format!("pickled weights are damaged ({error})"));
    let file = File::open(source).map_err(|error| Error::file(source, format!("file cannot be opened ({error})")))?;
    let length_bytes = file.metadata().map_err(|error| damaged(&error))?.len();
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(|error| {
        Error::file(source, format!("file is not in PyTorch's zip format ({error})"))
            .with_hint("save it with PyTorch 1.6 or newer, or get a model that comes as safetensors")
    })?;
    let mut folders = Vec::new();
    for index in 0..archive.len() {
        let entry = archive.by_index(index).map_err(|error| damaged(&error))?;
        let name = entry.name().map_err(|error| damaged(&error))?;
        folders.extend(name.strip_suffix("data.pkl").map(str::to_owned));
    }
    let [folder] = folders.as_slice() else {
        return Err(damaged(&"it must hold one data.pkl"));
    };
    let folder = folder.clone();

    let entry = archive.by_name(&format!("{folder}data.pkl")).map_err(|error| damaged(&error))?;
    let mut stack = Stack::empty();
    stack.read_loop(&mut BufReader::new(entry)).map_err(|error| damaged(&error))?;
    let Object::Dict(entries) = stack.finalize().map_err(|error| damaged(&error))? else {
        return Err(Error::file(source, "pickle holds something other than a dict of tensors"));
    };
    let mut problems = Problems::default();
    let mut names = BTreeSet::new();
    for (key, value) in entries {
        let Object::Unicode(name) = key else {
            problems.push("pickle has a key that is no string");
            continue;
        };
        // The module versions that PyTorch's state_dict carries along.
        if name == "_metadata" {
            continue;
        }
        let folder = Path::new(&folder).join("data");
        match value.into_tensor_info(Object::Unicode(name.clone()), &folder) {
            Ok(Some(info)) => {
                if let Err(problem) = check_extent(&mut archive, &info, length_bytes) {
                    problems.push(format!("{problem}: `{name}`"));
                }
                if !names.insert(name.clone()) {
                    problems.push(format!("tensor is there twice: `{name}`"));
                }
            }
            Ok(None) => problems.push(format!("entry is not a tensor: `{name}`")),
            Err(error) => problems.push(format!("tensor cannot be read ({error}): `{name}`")),
        }
    }
    if names.is_empty() {
        problems.push(format!("pickle holds no tensors: `{}`", source.display()));
    }
    problems.into_result(source)?;
    Ok(names.into_iter().collect())
}

/// Checks that a tensor lies inside its storage, and the storage inside the file.
fn check_extent(
    archive: &mut ZipArchive<BufReader<File>>,
    info: &TensorInfo,
    length_bytes: u64,
) -> Result<(), &'static str> {
    let storage = archive.by_name(&info.path).map_err(|_| "storage is missing")?;
    let item_size = info.dtype.size_in_bytes();
    let elements = info.layout.dims().iter().try_fold(1_usize, |product, size| product.checked_mul(*size));
    // Candle keeps the offset in bytes.
    let end = elements
        .and_then(|elements| elements.checked_mul(item_size))
        .and_then(|size| size.checked_add(info.layout.start_offset()))
        .ok_or("size overflows")?;
    if end as u64 > storage.size() || storage.size() > length_bytes {
        return Err("tensor reaches beyond its storage");
    }
    Ok(())
}

/// Lets `write` make a file under a passing name, then gives it its own.
fn write_whole(target: &Path, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let partial = target.with_file_name(format!(".{name}.partial"));
    let written =
        write(&partial).and_then(|()| fs::rename(&partial, target).map_err(|error| writing_failed(target, &error)));
    if written.is_err() {
        // The write's own error is what matters; a partial file that cannot be removed is invisible to readers.
        let _ = fs::remove_file(&partial);
    }
    written
}

fn writing_failed(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::file(path, format!("weights cannot be written ({error})"))
}
