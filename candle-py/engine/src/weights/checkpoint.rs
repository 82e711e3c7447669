//! A model's weights files, safetensors or GGUF: found, mapped and checked whole, header against length, before any
//! tensor is read.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::Path;

use candle_core::safetensors::Load;
use candle_core::{DType, Device, Tensor};
use memmap2::Mmap;
#[cfg(unix)]
use memmap2::UncheckedAdvice;
use safetensors::tensor::{Dtype, Metadata, SafeTensorError, SafeTensors, TensorView};

use super::gguf::GgufWeights;
use crate::config::read_json;
use crate::error::{Error, Problems, Result};
use crate::gguf::{GgufFile, gguf_files};
use crate::shard::Slice;

/// One file, of either format.
#[derive(Debug)]
enum WeightsFile {
    Safetensors(MappedFile),
    Gguf(GgufWeights),
}

/// One safetensors file, whose header is known to fit its length.
#[derive(Debug)]
struct MappedFile {
    map: Mmap,
    metadata: Metadata,
    data_start: usize,
}

/// What a header says of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorHeader {
    /// How its numbers are stored; float32 for all of a GGUF file, whose blocks are told apart when they are read.
    pub dtype: Dtype,
    /// Its sizes, outermost first.
    pub shape: Vec<usize>,
    /// Its name in the file.
    pub stored_name: String,
    file: usize,
}

/// All tensors of a model by name; their data stays in the files until asked for. Names that old checkpoints use for
/// the two halves of a layer norm (gamma, beta) are told as today's (weight, bias).
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<WeightsFile>,
    tensors: BTreeMap<String, TensorHeader>,
}

impl Checkpoint {
    /// Opens `model.safetensors`, or the shards that `model.safetensors.index.json` names.
    ///
    /// # Errors
    /// No such file; a shard that is missing; a header that is damaged or does not fit the file's length; a name in two
    /// shards or in the index alone. All that is found is told together.
    pub fn open(dir: &Path) -> Result<Self> {
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        let mut problems = Problems::default();
        let mut checkpoint = Self { files: Vec::new(), tensors: BTreeMap::new() };
        if single.exists() {
            checkpoint.add_file(&single, &mut problems);
        } else if index.exists() {
            let weight_map = read_index(&index)?;
            let shards: BTreeSet<&String> = weight_map.values().collect();
            for shard in shards {
                checkpoint.add_file(&dir.join(shard), &mut problems);
            }
            if problems.is_empty() {
                for (name, shard) in
                    weight_map.iter().filter(|(name, _)| !checkpoint.tensors.contains_key(&modern_name(name)))
                {
                    problems.push(format!("tensor that the index places in {shard} is not there: `{name}`"));
                }
            }
        } else {
            return Err(no_weights(dir));
        }
        problems.into_result(dir)?;
        Ok(checkpoint)
    }

    /// Takes the tensors of a GGUF file under the names that Hugging Face's checkpoints have.
    ///
    /// # Errors
    /// A tensor of a kind that is not supported, or one that is not whole.
    pub fn from_gguf(file: GgufFile) -> Result<Self> {
        let weights = GgufWeights::new(file)?;
        let tensors = weights.names().map(|(name, stored_name, shape)| {
            (
                name,
                TensorHeader { dtype: Dtype::F32, shape: shape.to_vec(), stored_name: stored_name.to_owned(), file: 0 },
            )
        });
        Ok(Self { tensors: tensors.collect(), files: vec![WeightsFile::Gguf(weights)] })
    }

    fn add_file(&mut self, path: &Path, problems: &mut Problems) {
        let file = match MappedFile::open(path) {
            Ok(file) => file,
            Err(error) => return problems.push(error.to_string()),
        };
        for (name, info) in file.metadata.tensors() {
            let modern_name = modern_name(&name);
            let (dtype, shape) = (info.dtype, info.shape.clone());
            let header = TensorHeader { dtype, shape, stored_name: name, file: self.files.len() };
            if let Some(earlier) = self.tensors.insert(modern_name, header) {
                problems.push(format!("tensor is there twice: `{}`", earlier.stored_name));
            }
        }
        self.files.push(WeightsFile::Safetensors(file));
    }

    /// Every tensor, by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorHeader> {
        &self.tensors
    }

    /// Reads one tensor in the dtype that it is stored in; what a GGUF file holds, in float32.
    pub fn read(&self, name: &str) -> Result<Tensor> {
        let header = self.header(name)?;
        match &self.files[header.file] {
            WeightsFile::Safetensors(file) => {
                let tensor = file.view(&header.stored_name)?.load(&Device::Cpu)?;
                file.let_go(&header.stored_name);
                Ok(tensor)
            }
            WeightsFile::Gguf(file) => file.read(&header.stored_name),
        }
    }

    /// Reads a part of one tensor; `None` where there is nothing to read. Nothing
    /// else is read, but for the other columns of a GGUF file's rows.
    pub fn read_part(&self, name: &str, slice: &Slice) -> Result<Option<Tensor>> {
        let (rows, columns) = match slice {
            Slice::Nothing => return Ok(None),
            Slice::Whole => return self.read(name).map(Some),
            Slice::Blocks(count, rows) => return self.read_blocks(name, *count, rows).map(Some),
            Slice::Rows(rows) => (Some(rows), None),
            Slice::Columns(columns) => (None, Some(columns)),
        };
        let header = self.header(name)?;
        let tensor = match &self.files[header.file] {
            WeightsFile::Safetensors(file) => {
                let view = file.view(&header.stored_name)?;
                let rows = rows.cloned().unwrap_or(0..view.shape()[0]);
                let tensor = part(&view, rows, columns.cloned())?;
                file.let_go(&header.stored_name);
                tensor
            }
            WeightsFile::Gguf(file) => file.read_part(&header.stored_name, rows, columns)?,
        };
        Ok(Some(tensor))
    }

    /// The same rows of each of `count` blocks of a tensor.
    fn read_blocks(&self, name: &str, count: usize, rows: &Range<usize>) -> Result<Tensor> {
        let height = self.header(name)?.shape.first().copied().unwrap_or(0) / count.max(1);
        let of_block = |block| Slice::Rows(block * height + rows.start..block * height + rows.end);
        let parts = (0..count).filter_map(|block| self.read_part(name, &of_block(block)).transpose());
        Ok(Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 0)?)
    }

    fn header(&self, name: &str) -> Result<&TensorHeader> {
        self.tensors.get(name).ok_or_else(|| Error::internal(format!("no tensor: `{name}`")))
    }
}

impl MappedFile {
    fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::file(path, "weights file is missing"),
            _ => Error::file(path, format!("weights file cannot be opened ({error})")),
        })?;
        // SAFETY: the map is read-only and private to this process. That nobody cuts the file while it is mapped is the
        // one thing we must trust, as every reader of mapped weights does; its length is checked against its header
        // next.
        let map = unsafe { Mmap::map(&file) }
            .map_err(|error| Error::file(path, format!("weights file cannot be mapped ({error})")))?;
        let (header_len, metadata) =
            SafeTensors::read_metadata(&map).map_err(|error| Error::file(path, damage(&error)))?;
        Ok(Self { data_start: size_of::<u64>() + header_len, map, metadata })
    }

    /// Gives back the memory of a tensor's pages that were read: weights are not held twice while a model loads. They are
    /// read again from the file where they are asked for again.
    fn let_go(&self, name: &str) {
        #[cfg(unix)]
        if let Some(info) = self.metadata.info(name) {
            let (start, end) = (self.data_start + info.data_offsets.0, self.data_start + info.data_offsets.1);
            // SAFETY: the map is a private, read-only view of a file, so pages that are dropped come back with the same
            // bytes; nothing borrows them here.
            let advised = unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, start, end - start) };
            drop(advised); // advice only: where the system does not take it, memory is held a little longer
        }
    }

    fn view(&self, name: &str) -> Result<TensorView<'_>> {
        let damaged = || Error::internal(format!("tensor does not fit its file: `{name}`"));
        let info = self.metadata.info(name).ok_or_else(damaged)?;
        let (start, end) = info.data_offsets;
        let data = self.map.get(self.data_start + start..self.data_start + end).ok_or_else(damaged)?;
        TensorView::new(info.dtype, info.shape.clone(), data).map_err(|_| damaged())
    }
}

/// Some rows of a tensor, all of their columns or some; no others are touched.
fn part(view: &TensorView<'_>, rows: Range<usize>, columns: Option<Range<usize>>) -> Result<Tensor> {
    let outside = || Error::internal(format!("no such part of a tensor of shape: `{:?}`", view.shape()));
    let mut shape = view.shape().to_vec();
    let [count, rest @ ..] = shape.as_mut_slice() else { return Err(outside()) };
    let number_bytes = view.dtype().bitsize() / 8;
    let row_bytes = rest.iter().product::<usize>() * number_bytes;
    *count = rows.len();
    let data = view.data().get(rows.start * row_bytes..rows.end * row_bytes).ok_or_else(outside)?;
    let dtype = DType::try_from(view.dtype())?;
    let Some(columns) = columns else {
        return Ok(Tensor::from_raw_buffer(data, dtype, &shape, &Device::Cpu)?);
    };
    let bytes = columns.start * number_bytes..columns.end * number_bytes;
    if rest.len() != 1 || bytes.end > row_bytes {
        return Err(outside());
    }
    rest[0] = columns.len();
    let data: Vec<u8> = data.chunks_exact(row_bytes.max(1)).flat_map(|row| &row[bytes.clone()]).copied().collect();
    Ok(Tensor::from_raw_buffer(&data, dtype, &shape, &Device::Cpu)?)
}

/// Today's name of a tensor.
fn modern_name(name: &str) -> String {
    match name.rsplit_once('.') {
        Some((norm, "gamma")) if norm.ends_with("LayerNorm") => format!("{norm}.weight"),
        Some((norm, "beta")) if norm.ends_with("LayerNorm") => format!("{norm}.bias"),
        _ => name.to_owned(),
    }
}

/// A clause for what is wrong with a file.
fn damage(error: &SafeTensorError) -> String {
    match error {
        SafeTensorError::MetadataIncompleteBuffer => {
            "weights file is shorter or longer than its header says".to_owned()
        }
        SafeTensorError::HeaderTooSmall | SafeTensorError::InvalidHeaderLength => {
            "weights file is cut short inside its header".to_owned()
        }
        other => format!("weights file has a damaged header ({other})"),
    }
}

/// The index: tensor name to file name.
fn read_index(path: &Path) -> Result<HashMap<String, String>> {
    let index = read_json(path)?;
    let map = index.get("weight_map").and_then(|map| map.as_object()).filter(|map| !map.is_empty());
    let map = map.ok_or_else(|| Error::file(path, "index has no weight_map"))?;
    map.iter()
        .map(|(name, shard)| match shard.as_str() {
            Some(shard) if Path::new(shard).file_name().is_some_and(|name| name == shard) => {
                Ok((name.clone(), shard.to_owned()))
            }
            _ => Err(Error::file(path, format!("index names something that is no file beside it ({shard})"))),
        })
        .collect()
}

/// The error for a folder without safetensors.
fn no_weights(dir: &Path) -> Error {
    let pickles = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
    let error = Error::file(dir, "no model.safetensors or model.safetensors.index.json");
    if let Some(file) = gguf_files(dir).first() {
        return error.with_hint(format!("it has a GGUF file: give its own path, {}", file.display()));
    }
    match pickles.iter().find(|name| dir.join(name).exists()) {
        Some(name) => error.with_hint(format!("it has {name}: turn it into safetensors with `jobs convert`")),
        None => error.with_hint("give the folder that holds config.json and the weights"),
    }
}
