//! The GGUF file format, versions 2 and 3: header, metadata and list of tensors, each length checked against the file
//! before it is believed. Knows no model and dequantises nothing.
//!
//! Source: the format's description in ggml's repository, docs/gguf.md. Candle's own reader is not used for the header:
//! it divides by the alignment that a file gives, holds 32 bytes for each byte of an array, and cannot name a kind of
//! tensor that it does not know.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::{Error, Result};

const MAGIC: &[u8] = b"GGUF";
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_DIMENSIONS: u32 = 4;

/// Bounds that no real file reaches; a larger number is damage, and must not become an allocation.
const MAX_HEADER_BYTES: usize = 1 << 28;
const MAX_TEXT_BYTES: u64 = 1 << 24;
const MAX_ELEMENTS: u64 = 1 << 23;
const MAX_ENTRIES: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 17;

const TEXT: u32 = 8;
const LIST: u32 = 9;

/// One value of a file's metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum GgufValue {
    /// u8, u16, u32 or u64.
    Unsigned(u64),
    /// i8, i16, i32 or i64.
    Signed(i64),
    /// f32 or f64.
    Float(f64),
    /// A truth value.
    Bool(bool),
    /// A string; bytes that are no UTF-8 are replaced.
    Text(String),
    /// Values of one kind, none of which is a list.
    List(Vec<GgufValue>),
}

/// A value as it is kept: lists stay in the file until asked for.
#[derive(Debug)]
enum Entry {
    Single(GgufValue),
    List { kind: u32, count: u64, start: usize },
}

/// What a header says of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GgufTensor {
    /// ggml's number for how its blocks are stored.
    pub kind: u32,
    /// Its sizes, outermost first (the file has them innermost first).
    pub shape: Vec<usize>,
    /// Where it begins, from the start of the data.
    offset: u64,
}

/// An open file whose header is whole.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    map: Mmap,
    entries: BTreeMap<String, Entry>,
    tensors: BTreeMap<String, GgufTensor>,
    data_start: u64,
}

impl GgufFile {
    /// Maps a file and reads its header.
    ///
    /// # Errors
    /// [`Error::Model`] for a file that is missing, of another format or version, or damaged.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::file(path, "weights file is missing"),
            _ => Error::file(path, format!("weights file cannot be opened ({error})")),
        })?;
        // SAFETY: the map is read-only and private to this process. That nobody cuts the file while it is mapped is the
        // one thing we must trust, as every reader of mapped weights does; every range is checked against its length.
        let map = unsafe { Mmap::map(&file) }
            .map_err(|error| Error::file(path, format!("weights file cannot be mapped ({error})")))?;
        let header = Cursor::new(&map).header().map_err(|reason| Error::file(path, reason))?;
        let Header { entries, tensors, data_start } = header;
        Ok(Self { path: path.to_owned(), map, entries, tensors, data_start })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Names of all metadata, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The value of one key.
    ///
    /// # Errors
    /// [`Error::Model`] for a list that holds something that its kind does not allow.
    pub fn value(&self, key: &str) -> Result<Option<GgufValue>> {
        match self.entries.get(key) {
            None => Ok(None),
            Some(Entry::Single(value)) => Ok(Some(value.clone())),
            Some(Entry::List { kind, count, start }) => {
                let mut cursor = Cursor { bytes: &self.map, position: *start, elements: 0 };
                let values: Result<Vec<GgufValue>, String> = (0..*count).map(|_| cursor.single(*kind)).collect();
                let damaged = |reason| Error::file(&self.path, format!("metadata is damaged at {key} ({reason})"));
                Ok(Some(GgufValue::List(values.map_err(damaged)?)))
            }
        }
    }

    /// Values in the list of one key; None for another kind of value, or none.
    pub fn list_len(&self, key: &str) -> Option<usize> {
        match self.entries.get(key) {
            Some(Entry::List { count, .. }) => usize::try_from(*count).ok(),
            _ => None,
        }
    }

    /// All tensors by their names in the file.
    pub fn tensors(&self) -> &BTreeMap<String, GgufTensor> {
        &self.tensors
    }

    /// Where `size_bytes` bytes of a tensor lie in the file; None when it is not that long.
    pub fn range(&self, tensor: &GgufTensor, size_bytes: u64) -> Option<Range<usize>> {
        let start = self.data_start.checked_add(tensor.offset)?;
        let end = start.checked_add(size_bytes).filter(|end| *end <= self.map.len() as u64)?;
        Some(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
    }

    /// The bytes of a range that [`Self::range`] gave.
    pub fn bytes(&self, range: Range<usize>) -> Option<&[u8]> {
        self.map.get(range)
    }
}

/// The GGUF file that `path` means: itself, or the only one in a folder without `config.json`.
///
/// # Errors
/// [`Error::Model`] for a folder that holds several.
pub fn find_gguf(path: &Path) -> Result<Option<PathBuf>> {
    if !path.is_dir() {
        return Ok(is_gguf(path).then(|| path.to_owned()));
    }
    if path.join("config.json").exists() {
        return Ok(None);
    }
    let mut files = gguf_files(path);
    match files.len() {
        0 | 1 => Ok(files.pop()),
        count => {
            Err(Error::file(path, format!("folder holds {count} GGUF files")).with_hint("give the path of one of them"))
        }
    }
}

/// The GGUF files in a folder, sorted; none of a folder that cannot be read.
pub fn gguf_files(folder: &Path) -> Vec<PathBuf> {
    let entries = folder.read_dir().into_iter().flatten().flatten();
    let mut files: Vec<PathBuf> =
        entries.map(|entry| entry.path()).filter(|file| is_gguf(file) && file.is_file()).collect();
    files.sort();
    files
}

fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
}

struct Header {
    entries: BTreeMap<String, Entry>,
    tensors: BTreeMap<String, GgufTensor>,
    data_start: u64,
}

/// Reads a file's bytes from the front; a reason is a clause for an error.
struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
    elements: u64,
}

impl<'a> Cursor<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0, elements: 0 }
    }

    fn header(mut self) -> Result<Header, String> {
        if self.bytes.get(..MAGIC.len()).is_some_and(|start| start != MAGIC) {
            return Err("weights file is no GGUF file".to_owned());
        }
        self.take(MAGIC.len() as u64)?;
        match self.u32()? {
            2 | 3 => {}
            version if version != 0 && version & 0xFFFF == 0 => {
                return Err(format!("GGUF file is big-endian, which is not supported (version {version:#010x})"));
            }
            version => return Err(format!("GGUF version is not supported (version {version}; 2 and 3 are)")),
        }
        let tensor_count = self.u64()?;
        let entry_count = self.u64()?;
        for (count, most, what) in [(tensor_count, MAX_TENSORS, "tensors"), (entry_count, MAX_ENTRIES, "entries")] {
            if count > most {
                return Err(format!("weights file has a damaged header ({count} {what}, more than {most})"));
            }
        }
        let mut entries = BTreeMap::new();
        for _ in 0..entry_count {
            let key = self.text()?;
            let entry = self.entry().map_err(|reason| format!("{reason} at {}", shortened(&key)))?;
            if entries.insert(key.clone(), entry).is_some() {
                return Err(format!("weights file has a key twice ({})", shortened(&key)));
            }
        }
        let alignment = alignment(entries.get("general.alignment"))?;
        let mut tensors = BTreeMap::new();
        for _ in 0..tensor_count {
            let name = self.text()?;
            let tensor = self.tensor(alignment).map_err(|reason| format!("{reason} at {}", shortened(&name)))?;
            if tensors.insert(name.clone(), tensor).is_some() {
                return Err(format!("weights file has a tensor twice ({})", shortened(&name)));
            }
        }
        let data_start = (self.position as u64).next_multiple_of(alignment);
        Ok(Header { entries, tensors, data_start })
    }

    /// A value, lists only walked over.
    fn entry(&mut self) -> Result<Entry, String> {
        let kind = self.u32()?;
        if kind != LIST {
            return Ok(Entry::Single(self.single(kind)?));
        }
        let (kind, count) = (self.u32()?, self.u64()?);
        self.elements = self.elements.saturating_add(count);
        if self.elements > MAX_ELEMENTS {
            return Err(format!("weights file has a damaged header (more than {MAX_ELEMENTS} values in lists)"));
        }
        let start = self.position;
        if kind == TEXT {
            for _ in 0..count {
                let size_bytes = self.text_size()?;
                self.take(size_bytes)?;
            }
        } else {
            let size = number_size(kind)?;
            self.take(count.saturating_mul(size))?;
        }
        Ok(Entry::List { kind, count, start })
    }

    fn single(&mut self, kind: u32) -> Result<GgufValue, String> {
        Ok(match kind {
            0 => GgufValue::Unsigned(u64::from(self.array::<1>()?[0])),
            1 => GgufValue::Signed(i64::from(i8::from_le_bytes(self.array()?))),
            2 => GgufValue::Unsigned(u64::from(u16::from_le_bytes(self.array()?))),
            3 => GgufValue::Signed(i64::from(i16::from_le_bytes(self.array()?))),
            4 => GgufValue::Unsigned(u64::from(self.u32()?)),
            5 => GgufValue::Signed(i64::from(i32::from_le_bytes(self.array()?))),
            6 => GgufValue::Float(f64::from(f32::from_le_bytes(self.array()?))),
            7 => match self.array::<1>()?[0] {
                0 => GgufValue::Bool(false),
                1 => GgufValue::Bool(true),
                other => return Err(format!("weights file has a damaged header (truth value {other})")),
            },
            TEXT => GgufValue::Text(self.text()?),
            10 => GgufValue::Unsigned(self.u64()?),
            11 => GgufValue::Signed(i64::from_le_bytes(self.array()?)),
            12 => GgufValue::Float(f64::from_le_bytes(self.array()?)),
            _ => return Err(unknown_kind(kind)),
        })
    }

    fn tensor(&mut self, alignment: u64) -> Result<GgufTensor, String> {
        let dimensions = self.u32()?;
        if dimensions > MAX_DIMENSIONS {
            return Err(format!("weights file has a damaged header ({dimensions} dimensions)"));
        }
        let sizes: Vec<u64> = (0..dimensions).map(|_| self.u64()).collect::<Result<_, _>>()?;
        let (kind, offset) = (self.u32()?, self.u64()?);
        if !offset.is_multiple_of(alignment) {
            return Err(format!("weights file has a damaged header (offset {offset} off the alignment {alignment})"));
        }
        let elements = sizes.iter().try_fold(1_u64, |product, size| product.checked_mul(*size));
        // More bits than any file has.
        if elements.is_none_or(|elements| elements > 1 << 48) {
            return Err(format!("weights file has a damaged header (shape {sizes:?})"));
        }
        let shape = sizes.iter().rev().map(|size| usize::try_from(*size).map_err(|error| error.to_string()));
        Ok(GgufTensor { kind, shape: shape.collect::<Result<_, _>>()?, offset })
    }

    fn text_size(&mut self) -> Result<u64, String> {
        let size_bytes = self.u64()?;
        if size_bytes > MAX_TEXT_BYTES && size_bytes < self.bytes.len() as u64 {
            return Err(format!("weights file has a damaged header (a string of {size_bytes} bytes)"));
        }
        Ok(size_bytes)
    }

    fn text(&mut self) -> Result<String, String> {
        let size_bytes = self.text_size()?;
        Ok(String::from_utf8_lossy(self.take(size_bytes)?).into_owned())
    }

    fn u32(&mut self) -> Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let bytes = self.take(N as u64)?;
        bytes.try_into().map_err(|_| "weights file is cut short inside its header".to_owned())
    }

    fn take(&mut self, size_bytes: u64) -> Result<&'a [u8], String> {
        let left = &self.bytes[self.position..];
        let size = usize::try_from(size_bytes).ok().filter(|size| *size <= left.len());
        let Some(size) = size else {
            return Err("weights file is cut short inside its header".to_owned());
        };
        self.position += size;
        if self.position > MAX_HEADER_BYTES {
            return Err(format!("weights file has a damaged header (longer than {MAX_HEADER_BYTES} bytes)"));
        }
        Ok(&left[..size])
    }
}

/// Where tensors may begin: at multiples of this.
fn alignment(entry: Option<&Entry>) -> Result<u64, String> {
    match entry {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Entry::Single(GgufValue::Unsigned(value))) if value.is_power_of_two() && (8..=1 << 16).contains(value) => {
            Ok(*value)
        }
        Some(_) => {
            Err("weights file has a damaged header (general.alignment is no power of two from 8 to 65536)".to_owned())
        }
    }
}

/// Bytes of one number or truth value in a list.
fn number_size(kind: u32) -> Result<u64, String> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        LIST => Err("metadata holds a list of lists, which is not supported".to_owned()),
        _ => Err(unknown_kind(kind)),
    }
}

fn unknown_kind(kind: u32) -> String {
    format!("weights file has a damaged header (a value of kind {kind})")
}

/// A name cut to what a message can bear.
fn shortened(name: &str) -> String {
    const LONGEST: usize = 80;
    name.chars().take(LONGEST).flat_map(char::escape_default).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
