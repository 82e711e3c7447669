//! What the engine's tests share: the golden folders, ragged batches, and model folders made on the spot.

#![allow(dead_code, clippy::unwrap_used)]

use std::collections::{BTreeMap, HashMap};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Device as TensorDevice, Tensor};
use candle_engine::comm::Tcp;
use candle_engine::cpu::{Isa, Kernels, Storage};
use candle_engine::generate::{Generator, Limits, NoMasks, Params};
use candle_engine::{DecoderSession, Device, Engine, LoadOptions, Output, Ragged, cuda_devices};
use serde_json::{Value, json};
use tempfile::TempDir;

/// A folder of golden values.
pub fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/golden").join(name)
}

/// The expected numbers `key` of a golden folder.
pub fn expected(name: &str, key: &str) -> Vec<f32> {
    let tensors =
        candle_core::safetensors::load(golden(name).join("expected.safetensors"), &TensorDevice::Cpu).unwrap();
    tensors[key].flatten_all().unwrap().to_vec1().unwrap()
}

/// The sequences `key` of a golden folder's cases.
pub fn cases(name: &str, key: &str) -> Vec<Vec<u32>> {
    let text = std::fs::read(golden(name).join("cases.json")).unwrap();
    let cases: Value = serde_json::from_slice(&text).unwrap();
    serde_json::from_value(cases[key].clone()).unwrap()
}

/// A batch that owns its numbers.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub ids: Vec<u32>,
    pub offsets: Vec<u32>,
    pub type_ids: Option<Vec<u32>>,
}

impl Batch {
    pub fn new(sequences: &[Vec<u32>]) -> Self {
        let mut offsets = vec![0];
        for sequence in sequences {
            offsets.push(offsets.last().unwrap() + sequence.len() as u32);
        }
        Self { ids: sequences.concat(), offsets, type_ids: None }
    }

    pub fn with_types(self, types: &[Vec<u32>]) -> Self {
        Self { type_ids: Some(types.concat()), ..self }
    }

    pub fn ragged(&self) -> Ragged<'_> {
        Ragged { ids: &self.ids, offsets: &self.offsets, type_ids: self.type_ids.as_deref() }
    }
}

/// Every instruction set of this machine that float32 models run on.
pub fn instruction_sets() -> Vec<Isa> {
    let isas = Isa::ALL.into_iter().filter(|isa| isa.is_for(Storage::Float32));
    isas.filter(|isa| Kernels::new(*isa).is_some()).collect()
}

/// Loads with defaults.
pub fn load(dir: &Path) -> Engine {
    Engine::load(dir, &LoadOptions::default()).unwrap()
}

/// Loads with one instruction set.
pub fn load_with(dir: &Path, isa: Isa) -> Engine {
    load_on(dir, Way::Kernels(isa))
}

/// A way to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// The CPU's kernels with an instruction set.
    Kernels(Isa),
    /// Candle's tensors, on the CPU or a CUDA device.
    Tensors(Device),
}

impl Way {
    pub fn options(self) -> LoadOptions {
        match self {
            Way::Kernels(isa) => LoadOptions { isa: Some(isa), ..LoadOptions::default() },
            Way::Tensors(device) => LoadOptions { device, ..LoadOptions::default() },
        }
    }

    pub fn is_kernels(self) -> bool {
        matches!(self, Way::Kernels(_))
    }
}

/// Every way to compute that this build and this machine have.
pub fn ways() -> Vec<Way> {
    instruction_sets().into_iter().map(Way::Kernels).chain(tensor_ways()).collect()
}

/// Candle's tensors on all devices.
pub fn tensor_ways() -> Vec<Way> {
    let cuda = (cuda_devices() > 0).then_some(Device::Cuda(0));
    [Some(Device::Tensors), cuda].into_iter().flatten().map(Way::Tensors).collect()
}

/// Loads for one way to compute.
pub fn load_on(dir: &Path, way: Way) -> Engine {
    Engine::load(dir, &way.options()).unwrap()
}

/// The error of a load, as text and hint.
pub fn load_error(dir: &Path) -> (String, String) {
    match Engine::load(dir, &LoadOptions::default()) {
        Ok(_) => panic!("the model loads"),
        Err(error) => (error.to_string(), error.hint().unwrap_or_default().to_owned()),
    }
}

/// The largest difference between two lists of numbers of the same length.
pub fn distance(left: &[f32], right: &[f32]) -> f32 {
    assert_eq!(left.len(), right.len());
    left.iter().zip(right).map(|(left, right)| (left - right).abs()).fold(0.0, |most, each| {
        assert!(!each.is_nan());
        most.max(each)
    })
}

/// Whether two outputs are the same bit for bit.
pub fn same_bits(left: &Output, right: &[f32]) -> bool {
    left.data.iter().map(|value| value.to_bits()).eq(right.iter().map(|value| value.to_bits()))
}

/// Numbers that look random and are the same everywhere.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        // xorshift64*, Marsaglia 2003.
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// Between -1 and 1.
    pub fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    }

    pub fn below(&mut self, bound: u32) -> u32 {
        (self.next() >> 33) as u32 % bound
    }

    pub fn sequence(&mut self, length: usize, vocab_size: u32) -> Vec<u32> {
        (0..length).map(|_| self.below(vocab_size)).collect()
    }
}

/// A model folder in the making.
pub struct Folder {
    pub dir: TempDir,
    pub config: Value,
    pub tensors: BTreeMap<String, Tensor>,
}

impl Folder {
    pub fn empty(config: Value) -> Self {
        Self { dir: tempfile::tempdir().unwrap(), config, tensors: BTreeMap::new() }
    }

    /// A copy of a golden folder's config and tensors.
    pub fn from_golden(name: &str) -> Self {
        let config = serde_json::from_slice(&std::fs::read(golden(name).join("config.json")).unwrap()).unwrap();
        let tensors =
            candle_core::safetensors::load(golden(name).join("model.safetensors"), &TensorDevice::Cpu).unwrap();
        Self { tensors: tensors.into_iter().collect(), ..Self::empty(config) }
    }

    /// A BERT with random weights.
    pub fn bert(hidden: usize, heads: usize, intermediate: usize, layers: usize, types: usize) -> Self {
        let mut folder = Self::empty(json!({
            "model_type": "bert", "architectures": ["BertModel"], "vocab_size": 50, "hidden_size": hidden,
            "num_attention_heads": heads, "intermediate_size": intermediate, "num_hidden_layers": layers,
            "max_position_embeddings": 600, "type_vocab_size": types, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
        }));
        let mut random = Random::new((hidden * 31 + heads * 7 + intermediate) as u64);
        let mut add = |name: String, shape: &[usize]| {
            let is_norm = name.contains("LayerNorm.weight");
            let scale = if shape.len() == 2 { (3.0 / shape[1] as f32).sqrt() } else { 0.3 };
            let values = (0..shape.iter().product()).map(|_| scale * random.number() + f32::from(u8::from(is_norm)));
            let tensor = Tensor::from_vec(values.collect::<Vec<f32>>(), shape, &TensorDevice::Cpu).unwrap();
            folder.tensors.insert(name, tensor);
        };
        add("embeddings.word_embeddings.weight".into(), &[50, hidden]);
        add("embeddings.position_embeddings.weight".into(), &[600, hidden]);
        if types > 0 {
            add("embeddings.token_type_embeddings.weight".into(), &[types, hidden]);
        }
        add("embeddings.LayerNorm.weight".into(), &[hidden]);
        add("embeddings.LayerNorm.bias".into(), &[hidden]);
        for layer in 0..layers {
            let linears = [
                ("attention.self.query", hidden, hidden),
                ("attention.self.key", hidden, hidden),
                ("attention.self.value", hidden, hidden),
                ("attention.output.dense", hidden, hidden),
                ("intermediate.dense", intermediate, hidden),
                ("output.dense", hidden, intermediate),
            ];
            for (name, out_features, in_features) in linears {
                add(format!("encoder.layer.{layer}.{name}.weight"), &[out_features, in_features]);
                add(format!("encoder.layer.{layer}.{name}.bias"), &[out_features]);
            }
            for name in ["attention.output.LayerNorm", "output.LayerNorm"] {
                add(format!("encoder.layer.{layer}.{name}.weight"), &[hidden]);
                add(format!("encoder.layer.{layer}.{name}.bias"), &[hidden]);
            }
        }
        folder
    }

    /// A decoder with random weights: `settings` over a small Llama's.
    pub fn decoder(settings: Value) -> Self {
        let mut config = json!({
            "model_type": "llama", "vocab_size": 50, "hidden_size": 24, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "hidden_act": "silu", "tie_word_embeddings": false,
        });
        settings.as_object().unwrap().iter().for_each(|(key, value)| config[key] = value.clone());
        let mut folder = Self::empty(config);
        let size = |key: &str| folder.config[key].as_u64().map(|value| value as usize);
        let (hidden, inner) = (size("hidden_size").unwrap(), size("intermediate_size").unwrap());
        let (heads, vocab) = (size("num_attention_heads").unwrap(), size("vocab_size").unwrap());
        let (kv_heads, layers) = (size("num_key_value_heads").unwrap(), size("num_hidden_layers").unwrap());
        let head_dim = size("head_dim").unwrap_or(hidden / heads);
        let family = folder.config["model_type"].as_str().unwrap().to_owned();
        let is = |key: &str| folder.config[key] == json!(true);
        let (attention_bias, mlp_bias, tied) = (is("attention_bias"), is("mlp_bias"), is("tie_word_embeddings"));
        let mut random = Random::new((hidden * 31 + heads * 7 + head_dim) as u64);
        let mut add = |name: String, shape: &[usize]| {
            let scale = if shape.len() == 2 { (3.0 / shape[1] as f32).sqrt() } else { 0.3 };
            let is_norm = name.contains("norm");
            let values = (0..shape.iter().product()).map(|_| scale * random.number() + f32::from(u8::from(is_norm)));
            let tensor = Tensor::from_vec(values.collect::<Vec<f32>>(), shape, &TensorDevice::Cpu).unwrap();
            folder.tensors.insert(name, tensor);
        };
        add("model.embed_tokens.weight".into(), &[vocab, hidden]);
        add("model.norm.weight".into(), &[hidden]);
        if !tied {
            add("lm_head.weight".into(), &[vocab, hidden]);
        }
        for layer in (0..layers).map(|layer| format!("model.layers.{layer}")) {
            let (q, kv) = (heads * head_dim, kv_heads * head_dim);
            let qkv_bias = attention_bias || family == "qwen2";
            for (name, out_features, in_features, bias) in [
                ("self_attn.q_proj", q, hidden, qkv_bias),
                ("self_attn.k_proj", kv, hidden, qkv_bias),
                ("self_attn.v_proj", kv, hidden, qkv_bias),
                ("self_attn.o_proj", hidden, q, attention_bias && family != "qwen2"),
                ("mlp.gate_proj", inner, hidden, mlp_bias),
                ("mlp.up_proj", inner, hidden, mlp_bias),
                ("mlp.down_proj", hidden, inner, mlp_bias),
            ] {
                add(format!("{layer}.{name}.weight"), &[out_features, in_features]);
                if bias {
                    add(format!("{layer}.{name}.bias"), &[out_features]);
                }
            }
            add(format!("{layer}.input_layernorm.weight"), &[hidden]);
            add(format!("{layer}.post_attention_layernorm.weight"), &[hidden]);
            if family == "qwen3" {
                add(format!("{layer}.self_attn.q_norm.weight"), &[head_dim]);
                add(format!("{layer}.self_attn.k_norm.weight"), &[head_dim]);
            }
        }
        folder
    }

    /// Adds a float32 tensor of zeros.
    pub fn zeros(&mut self, name: &str, shape: &[usize]) {
        self.tensors.insert(name.to_owned(), Tensor::zeros(shape, DType::F32, &TensorDevice::Cpu).unwrap());
    }

    /// Gives every tensor another name.
    pub fn rename(&mut self, name: impl Fn(&str) -> String) {
        self.tensors =
            std::mem::take(&mut self.tensors).into_iter().map(|(old, tensor)| (name(&old), tensor)).collect();
    }

    /// Writes a JSON file under the folder.
    pub fn file(&self, path: &str, content: &Value) {
        let path = self.dir.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content.to_string()).unwrap();
    }

    /// Writes config and weights; gives the folder.
    pub fn write(&self) -> &Path {
        self.file("config.json", &self.config);
        self.write_tensors("model.safetensors", |_| true);
        self.dir.path()
    }

    /// Writes the tensors that `keep` keeps into one file.
    pub fn write_tensors(&self, file: &str, keep: impl Fn(&str) -> bool) {
        let tensors: HashMap<&str, Tensor> = self
            .tensors
            .iter()
            .filter(|(name, _)| keep(name))
            .map(|(name, tensor)| (name.as_str(), tensor.clone()))
            .collect();
        let path = self.dir.path().join(file);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        candle_core::safetensors::save(&tensors, path).unwrap();
    }
}

/// Limits of a generator whose prompts enter in pieces.
pub fn limits(engine: &Engine, max_rows: usize, cache_bytes: usize) -> Limits {
    let (threads, isa) = (engine.threads(), engine.isa());
    Limits { max_rows, cache_bytes, longest_tokens: 0, beams: 1, step_tokens: 24, threads, isa }
}

/// New ids of all prompts, generated together.
pub fn generated(session: DecoderSession, prompts: &[Vec<u32>], params: &Params, limits: Limits) -> Vec<Vec<u32>> {
    let mut generator = Generator::new(session, limits).unwrap();
    for (id, prompt) in prompts.iter().enumerate() {
        generator.add(id as u64, prompt.clone(), params.clone()).unwrap();
    }
    let mut ids = vec![Vec::new(); prompts.len()];
    while generator.pending() > 0 {
        for event in generator.step(&mut NoMasks).unwrap() {
            ids[event.id as usize].extend(event.new_tokens);
        }
    }
    ids
}

/// Runs `work` on every rank of a group of threads over loopback sockets; what each gave, in rank order.
pub fn group<T: Send>(world: usize, timeout: Duration, work: impl Fn(Arc<Tcp>) -> T + Send + Sync) -> Vec<T> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = [listener.local_addr().unwrap().to_string()];
    std::thread::scope(|scope| {
        let (work, address) = (&work, &address);
        let host = scope.spawn(move || work(Arc::new(Tcp::host(listener, world, "secret", timeout).unwrap())));
        let follow = move |rank| work(Arc::new(Tcp::connect(rank, world, address, "secret", timeout).unwrap()));
        let others: Vec<_> = (1..world).map(|rank| scope.spawn(move || follow(rank))).collect();
        std::iter::once(host).chain(others).map(|rank| rank.join().unwrap()).collect()
    })
}
