//! A GGUF file's tensors under the names and in the order of Hugging Face's checkpoints, dequantised one at a time.
//! Kinds and extents of all of them are checked before any is read.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_core::quantized::{GgmlDType, ggml_file::qtensor_from_ggml};
use candle_core::{Device, Tensor};

use crate::error::{Error, Problems, Result};
use crate::gguf::{GgufFile, GgufTensor, GgufValue};

/// The factors of Llama 3's rotary angles, which are configuration rather than weights.
pub const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Numbers that are dequantised at a time where a part of a tensor is wanted.
const CHUNK_NUMBERS: usize = 1 << 20;

const SUPPORTED_KINDS: &str = "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K";

/// Parts of a layer: the file's name and the checkpoint's.
const LAYER_PARTS: [(&str, &str); 11] = [
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

/// A tensor that is known to be whole and of a kind that can be read.
#[derive(Debug)]
struct Stored {
    kind: GgmlDType,
    shape: Vec<usize>,
    range: Range<usize>,
    /// Heads whose rows are in interleaved rotary order.
    interleaved_heads: Option<usize>,
}

/// The tensors of one file, by their names in it.
#[derive(Debug)]
pub struct GgufWeights {
    file: GgufFile,
    tensors: BTreeMap<String, Stored>,
}

impl GgufWeights {
    /// Checks every tensor of a file.
    ///
    /// # Errors
    /// [`Error::Model`] for a kind that is not supported, a shape that the kind cannot have, a tensor that reaches
    /// beyond the file or into another.
    pub fn new(file: GgufFile) -> Result<Self> {
        refuse_kinds(&file)?;
        let heads = InterleavedHeads::of(&file)?;
        let mut problems = Problems::default();
        let mut tensors = BTreeMap::new();
        let mut ranges: Vec<(Range<usize>, &String)> = Vec::new();
        for (name, tensor) in file.tensors().iter().filter(|(name, _)| *name != ROPE_FACTORS) {
            let Some(kind) = supported(tensor.kind) else { continue };
            match extent(&file, tensor, kind) {
                Ok(range) => {
                    ranges.push((range.clone(), name));
                    let interleaved_heads = heads.count(name);
                    let stored = Stored { kind, shape: tensor.shape.clone(), range, interleaved_heads };
                    tensors.insert(name.clone(), stored);
                }
                Err(reason) => problems.push(format!("{reason}: `{name}`")),
            }
        }
        ranges.sort_unstable_by_key(|(range, _)| (range.start, range.end));
        for pair in ranges.windows(2) {
            if pair[1].0.start < pair[0].0.end {
                problems.push(format!("tensor shares bytes with {}: `{}`", pair[0].1, pair[1].1));
            }
        }
        problems.into_result(file.path())?;
        Ok(Self { file, tensors })
    }

    /// The checkpoint's name, the file's name and the shape of every tensor.
    pub fn names(&self) -> impl Iterator<Item = (String, &str, &[usize])> {
        self.tensors.iter().map(|(name, stored)| (checkpoint_name(name), name.as_str(), stored.shape.as_slice()))
    }

    /// Reads one tensor as float32, by its name in the file.
    pub fn read(&self, name: &str) -> Result<Tensor> {
        let stored = self.stored(name)?;
        let tensor = dequantised(stored.kind, self.bytes(name, stored)?, &stored.shape)?;
        match stored.interleaved_heads {
            Some(heads) => half_split(&tensor, heads).map_err(|error| {
                Error::model(format!("tensor does not divide into {heads} heads ({error}): `{name}`"))
            }),
            None => Ok(tensor),
        }
    }

    /// Reads some rows of a tensor, or some columns of all rows, as float32; no more than a few rows of the others are
    /// in memory at a time. Where rows are in rotary order, whole heads are meant.
    pub fn read_part(&self, name: &str, rows: Option<&Range<usize>>, columns: Option<&Range<usize>>) -> Result<Tensor> {
        let outside = || Error::internal(format!("no such part of tensor: `{name}`"));
        let stored = self.stored(name)?;
        let [height, rest @ ..] = stored.shape.as_slice() else { return Err(outside()) };
        let (rows, width) = (rows.cloned().unwrap_or(0..*height), rest.iter().product::<usize>());
        let head_rows = stored.interleaved_heads.map(|heads| height / heads.max(1));
        if rest.is_empty() || head_rows.is_some_and(|head| columns.is_some() || !rows.len().is_multiple_of(head.max(1)))
        {
            let (axis, places) = (usize::from(columns.is_some()), columns.unwrap_or(&rows));
            return Ok(self.read(name)?.narrow(axis, places.start, places.len())?.force_contiguous()?);
        }
        let (bytes, chunk_rows) = (self.bytes(name, stored)?, (CHUNK_NUMBERS / width.max(1)).max(1));
        let row_bytes = bytes.len() / (*height).max(1);
        let mut parts = Vec::new();
        for first in rows.clone().step_by(chunk_rows) {
            let last = rows.end.min(first + chunk_rows);
            let bytes = bytes.get(first * row_bytes..last * row_bytes).ok_or_else(outside)?;
            let part = dequantised(stored.kind, bytes, &[last - first, width])?;
            parts.push(match columns {
                Some(columns) => part.narrow(1, columns.start, columns.len())?.force_contiguous()?,
                None => part,
            });
        }
        let tensor = Tensor::cat(&parts, 0)?;
        Ok(match head_rows {
            Some(head) => half_split(&tensor, rows.len() / head.max(1))?,
            None => tensor,
        })
    }

    fn stored(&self, name: &str) -> Result<&Stored> {
        self.tensors.get(name).ok_or_else(|| Error::internal(format!("no tensor: `{name}`")))
    }

    fn bytes(&self, name: &str, stored: &Stored) -> Result<&[u8]> {
        let bytes = self.file.bytes(stored.range.clone());
        bytes.ok_or_else(|| Error::internal(format!("tensor does not fit its file: `{name}`")))
    }
}

/// Reads a small tensor of numbers that belong to the configuration; None when the file has none of that name.
///
/// # Errors
/// [`Error::Model`] when it is not whole, or is not stored as plain float32.
pub fn read_plain(file: &GgufFile, name: &str) -> Result<Option<Vec<f32>>> {
    let Some(tensor) = file.tensors().get(name) else { return Ok(None) };
    if tensor.kind != 0 {
        return Err(Error::model(format!("tensor is not stored as F32: `{name}`")));
    }
    let range = extent(file, tensor, GgmlDType::F32).map_err(|reason| Error::model(format!("{reason}: `{name}`")))?;
    let bytes = file.bytes(range).unwrap_or_default();
    Ok(Some(bytes.as_chunks::<4>().0.iter().map(|number| f32::from_le_bytes(*number)).collect()))
}

/// The name that a checkpoint of Hugging Face gives to a tensor of the file; an unknown one keeps its own.
fn checkpoint_name(name: &str) -> String {
    let Some((part, field)) = name.rsplit_once('.') else { return name.to_owned() };
    match part {
        "token_embd" => return format!("model.embed_tokens.{field}"),
        "output_norm" => return format!("model.norm.{field}"),
        "output" => return format!("lm_head.{field}"),
        _ => {}
    }
    let layer = part.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let known = layer.and_then(|(layer, part)| {
        let index = layer.parse::<usize>().ok().filter(|index| index.to_string() == layer)?;
        let (_, there) = LAYER_PARTS.iter().find(|(here, _)| *here == part)?;
        Some(format!("model.layers.{index}.{there}.{field}"))
    });
    known.unwrap_or_else(|| name.to_owned())
}

/// Heads of the tensors that files of the Llama architecture keep in interleaved rotary order.
struct InterleavedHeads {
    query: Option<usize>,
    key: Option<usize>,
}

impl InterleavedHeads {
    fn of(file: &GgufFile) -> Result<Self> {
        let is_llama = file.value("general.architecture")? == Some(GgufValue::Text("llama".to_owned()));
        let count = |key: &str| -> Result<Option<usize>> {
            Ok(match file.value(key)? {
                Some(GgufValue::Unsigned(heads)) => usize::try_from(heads).ok(),
                Some(GgufValue::Signed(heads)) => usize::try_from(heads).ok(),
                _ => None,
            })
        };
        let query = if is_llama { count("llama.attention.head_count")? } else { None };
        let key = if is_llama { count("llama.attention.head_count_kv")?.or(query) } else { None };
        Ok(Self { query, key })
    }

    fn count(&self, name: &str) -> Option<usize> {
        match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((_, "attn_q.weight" | "attn_q.bias")) => self.query,
            Some((_, "attn_k.weight" | "attn_k.bias")) => self.key,
            _ => None,
        }
    }
}

/// Rows of each head from pairs (0, 1), (2, 3) ... to first halves and second halves of the pairs.
fn half_split(tensor: &Tensor, heads: usize) -> Result<Tensor, candle_core::Error> {
    let shape = tensor.dims().to_vec();
    let row_numbers: usize = shape[1..].iter().product();
    let pairs = shape[0] / heads.max(1) / 2;
    let by_pairs = tensor.reshape((heads, pairs, 2, row_numbers))?;
    by_pairs.transpose(1, 2)?.contiguous()?.reshape(shape)
}

fn dequantised(kind: GgmlDType, bytes: &[u8], shape: &[usize]) -> Result<Tensor> {
    Ok(qtensor_from_ggml(kind, bytes, shape.to_vec(), &Device::Cpu)?.dequantize(&Device::Cpu)?)
}

/// Where a tensor lies; a clause for an error when it cannot be there.
fn extent(file: &GgufFile, tensor: &GgufTensor, kind: GgmlDType) -> Result<Range<usize>, String> {
    let block = kind.block_size();
    let row = tensor.shape.last().copied().unwrap_or(0);
    if row == 0 || !row.is_multiple_of(block) {
        return Err(format!("row of {row} numbers does not divide into blocks of {block}"));
    }
    // Shapes are bounded when the header is read.
    let blocks = tensor.shape.iter().map(|size| *size as u64).product::<u64>() / block as u64;
    let size_bytes = blocks.checked_mul(kind.type_size() as u64);
    let range = size_bytes.and_then(|size_bytes| file.range(tensor, size_bytes));
    range.ok_or_else(|| "weights file is shorter than its header says".to_owned())
}

/// The kinds that are read, by ggml's number.
fn supported(kind: u32) -> Option<GgmlDType> {
    Some(match kind {
        0 => GgmlDType::F32,
        1 => GgmlDType::F16,
        2 => GgmlDType::Q4_0,
        3 => GgmlDType::Q4_1,
        6 => GgmlDType::Q5_0,
        7 => GgmlDType::Q5_1,
        8 => GgmlDType::Q8_0,
        12 => GgmlDType::Q4K,
        13 => GgmlDType::Q5K,
        14 => GgmlDType::Q6K,
        30 => GgmlDType::BF16,
        _ => return None,
    })
}

/// What ggml calls its other kinds.
fn unsupported_name(kind: u32) -> String {
    let name = match kind {
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return format!("kind {kind}"),
    };
    name.to_owned()
}

/// Refuses kinds that cannot be read, each once, with how many tensors have it.
fn refuse_kinds(file: &GgufFile) -> Result<()> {
    let mut kinds: BTreeMap<u32, (usize, &str)> = BTreeMap::new();
    for (name, tensor) in file.tensors().iter().filter(|(_, tensor)| supported(tensor.kind).is_none()) {
        kinds.entry(tensor.kind).or_insert((0, name)).0 += 1;
    }
    let mut problems = Problems::default();
    for (kind, (count, first)) in kinds {
        let name = unsupported_name(kind);
        let tensors = if count == 1 { format!("tensor {first}") } else { format!("{count} tensors from {first} on") };
        problems.push(format!("kind of {tensors} is not supported: `{name}`"));
    }
    let hint = format!("quantise the model anew; supported kinds: {SUPPORTED_KINDS}");
    problems.into_result(file.path()).map_err(|error| error.with_hint(hint))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;
    use candle_core::quantized::gguf_file::{self, Value};
    use candle_core::quantized::{GgmlDType, QTensor};

    use super::{CHUNK_NUMBERS, GgufWeights, Tensor};
    use crate::gguf::GgufFile;

    #[test]
    fn parts_are_those_of_the_whole_tensor() {
        let (height, width) = (1200, 1024);
        assert!(height * width > CHUNK_NUMBERS, "one chunk proves nothing");
        let tensor = Tensor::randn(0f32, 1f32, (height, width), &Device::Cpu).unwrap();
        let quantised = QTensor::quantize(&tensor, GgmlDType::Q4_1).unwrap();
        let bias =
            QTensor::quantize(&Tensor::randn(0f32, 1f32, height, &Device::Cpu).unwrap(), GgmlDType::F32).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        let (architecture, heads) = (Value::String("llama".into()), Value::U32(24));
        let metadata = [("general.architecture", &architecture), ("llama.attention.head_count", &heads)];
        let names = ["blk.0.ffn_up.weight", "blk.0.attn_q.weight"];
        let tensors = [(names[0], &quantised), (names[1], &quantised), ("blk.0.attn_q.bias", &bias)];
        gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &metadata, &tensors).unwrap();
        let weights = GgufWeights::new(GgufFile::open(&path).unwrap()).unwrap();
        let numbers = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        for (name, rows) in [(names[0], 7..1133), (names[1], 100..1150), ("blk.0.attn_q.bias", 50..150)] {
            let wanted = weights.read(name).unwrap().narrow(0, rows.start, rows.len()).unwrap();
            let found = weights.read_part(name, Some(&rows), None).unwrap();
            assert_eq!((found.dims(), numbers(&found)), (wanted.dims(), numbers(&wanted)), "{name}");
        }
        let columns = 33..700;
        for name in names {
            let wanted = weights.read(name).unwrap().narrow(1, columns.start, columns.len()).unwrap();
            let found = weights.read_part(name, None, Some(&columns)).unwrap();
            assert_eq!((found.dims(), numbers(&found)), (wanted.dims(), numbers(&wanted)), "{name}");
        }
        assert!(weights.read_part(names[0], Some(&(1000..1300)), None).is_err());
    }
}
