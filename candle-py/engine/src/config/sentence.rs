//! What sentence-transformers' files say of the way from hidden states to an embedding: `modules.json` and the folders
//! it names. Old and new spellings are read; a module or setting that the engine does not follow is refused by name.

use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::{JsonObject, MAX_WIDTH, read_gguf_pooling, read_json};
use crate::cpu::Activation;
use crate::error::{Error, Problems, Result};
use crate::gguf::GgufFile;
use crate::pooling::{Pooling, PoolingMode};

/// The chain of modules of a sentence-transformers model; a plain transformer when there is no such file.
#[derive(Debug, Default)]
pub struct SentenceConfig {
    /// The transformer's folder under the model's; empty for the model's folder itself.
    pub transformer_path: PathBuf,
    /// How tokens become one row, if the files say.
    pub pooling: Option<PoolingConfig>,
    /// What follows the pooling, in order.
    pub modules: Vec<SentenceModule>,
}

/// `1_Pooling/config.json`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolingConfig {
    /// The modes, joined in this order.
    pub pooling: Pooling,
    /// Width of the token embeddings, if the file says.
    pub token_width: Option<usize>,
    /// Whether the tokens of the prompt are pooled too.
    pub include_prompt: bool,
}

/// A module after the pooling.
#[derive(Debug)]
pub enum SentenceModule {
    /// A linear layer and an activation.
    Dense(DenseConfig),
    /// Division by the Euclidean norm.
    Normalize,
}

/// `2_Dense/config.json`.
#[derive(Debug)]
pub struct DenseConfig {
    /// The folder that holds its weights.
    pub folder: PathBuf,
    /// Width before.
    pub in_features: usize,
    /// Width after.
    pub out_features: usize,
    /// Whether there is a bias.
    pub bias: bool,
    /// After the linear layer.
    pub activation: Activation,
}

impl SentenceConfig {
    /// Reads the chain of the model in `dir`; what is wrong goes to `problems`.
    ///
    /// # Errors
    /// When a file of the chain is missing or is not JSON.
    pub fn read(dir: &Path, problems: &mut Problems) -> Result<Self> {
        let modules_path = dir.join("modules.json");
        if !modules_path.exists() {
            return Self::without_modules(dir, problems);
        }
        let Value::Array(entries) = read_json(&modules_path)? else {
            return Err(Error::file(&modules_path, "file does not hold a JSON list"));
        };
        let mut chain = Self::default();
        for (index, entry) in entries.iter().enumerate() {
            let type_name = entry.get("type").and_then(Value::as_str).unwrap_or_default();
            let path = entry.get("path").and_then(Value::as_str).unwrap_or_default();
            let Some(path) = inside(path) else {
                problems.push(format!("modules.json: path leads out of the model's folder: `{path}`"));
                continue;
            };
            match (kind(type_name), index) {
                (Some("Transformer"), 0) => chain.transformer_path = path,
                (Some("Pooling"), 1) => chain.pooling = Some(PoolingConfig::read(&dir.join(path), problems)?),
                (Some("Dense"), 2..) if chain.pooling.is_some() => {
                    chain.modules.push(SentenceModule::Dense(DenseConfig::read(dir.join(path), problems)?));
                }
                (Some("Normalize"), 2..) if chain.pooling.is_some() => {
                    check_normalize(&dir.join(path), problems)?;
                    chain.modules.push(SentenceModule::Normalize);
                }
                (Some(_), _) => problems.push(format!("modules.json: module {index} is out of place: `{type_name}`")),
                (None, _) => problems.push(format!("modules.json: module {index} is not supported: `{type_name}`")),
            }
        }
        if entries.is_empty() {
            problems.push(format!("modules.json: lists no module: `{}`", modules_path.display()));
        }
        check_task(&dir.join(&chain.transformer_path), problems)?;
        Ok(chain)
    }

    /// The chain of a GGUF file: what the files beside it say where a folder was named, and the file's own pooling
    /// where they say nothing.
    ///
    /// # Errors
    /// As of [`Self::read`].
    pub fn read_gguf(path: &Path, file: &GgufFile, problems: &mut Problems) -> Result<Self> {
        let mut chain = if path.is_dir() { Self::read(path, problems)? } else { Self::default() };
        if chain.pooling.is_none()
            && let Some(mode) = read_gguf_pooling(file)?
        {
            let pooling = Pooling::new(vec![mode]);
            chain.pooling = Some(PoolingConfig { pooling, token_width: None, include_prompt: true });
        }
        Ok(chain)
    }

    /// A pooling folder counts even where no `modules.json` names it.
    fn without_modules(dir: &Path, problems: &mut Problems) -> Result<Self> {
        let folder = dir.join("1_Pooling");
        let pooling = match folder.join("config.json").exists() {
            true => Some(PoolingConfig::read(&folder, problems)?),
            false => None,
        };
        Ok(Self { pooling, ..Self::default() })
    }

    /// Whether the chain ends with the Euclidean norm.
    pub fn ends_normalized(&self) -> bool {
        matches!(self.modules.last(), Some(SentenceModule::Normalize))
    }

    /// Notes widths that do not follow from each other along the chain.
    pub fn check_widths(&self, hidden_size: usize, problems: &mut Problems) {
        let Some(config) = &self.pooling else { return };
        if let Some(width) = config.token_width.filter(|width| *width != hidden_size) {
            problems
                .push(format!("1_Pooling/config.json: token width is not the hidden size {hidden_size}: `{width}`"));
        }
        let mut width = config.pooling.width(hidden_size);
        for module in &self.modules {
            if let SentenceModule::Dense(dense) = module {
                if dense.in_features != width {
                    problems.push(format!(
                        "{}: in_features is not the width {width} of what comes before: `{}`",
                        dense.folder.join("config.json").display(),
                        dense.in_features
                    ));
                }
                width = dense.out_features;
            }
        }
    }
}

impl PoolingConfig {
    /// Reads the file in `folder`: `pooling_mode` (new) or a truth value per mode (old); mean when none is on.
    fn read(folder: &Path, problems: &mut Problems) -> Result<Self> {
        let file = JsonObject::read(&folder.join("config.json"))?;
        let modes = match file.get("pooling_mode") {
            Some(Value::String(name)) => modes(&[name.as_str()], &file, problems),
            Some(Value::Array(names)) => {
                let names: Vec<&str> = names.iter().map(|name| name.as_str().unwrap_or_default()).collect();
                modes(&names, &file, problems)
            }
            Some(_) => {
                problems.push(file.complaint("pooling_mode", "must be a mode or a list of modes"));
                Vec::new()
            }
            None => modes_from_flags(&file, problems),
        };
        let width_key =
            if file.has("embedding_dimension") { "embedding_dimension" } else { "word_embedding_dimension" };
        let token_width = file.get(width_key).is_some().then(|| file.size(width_key, 1, 1, MAX_WIDTH, problems));
        let include_prompt = file.flag("include_prompt", true, problems);
        let modes = if modes.is_empty() { vec![PoolingMode::Mean] } else { modes };
        Ok(Self { pooling: Pooling::new(modes), token_width, include_prompt })
    }
}

/// The modes of the new spelling, in the file's order.
fn modes(names: &[&str], file: &JsonObject, problems: &mut Problems) -> Vec<PoolingMode> {
    let modes: Option<Vec<PoolingMode>> = names.iter().map(|name| PoolingMode::from_file_name(name)).collect();
    modes.filter(|modes| !modes.is_empty()).unwrap_or_else(|| {
        problems.push(file.complaint("pooling_mode", "is not supported"));
        Vec::new()
    })
}

/// The modes of the old spelling, in the order in which they were always joined.
fn modes_from_flags(file: &JsonObject, problems: &mut Problems) -> Vec<PoolingMode> {
    const FLAGS: [(&str, PoolingMode); 6] = [
        ("pooling_mode_cls_token", PoolingMode::Cls),
        ("pooling_mode_max_tokens", PoolingMode::Max),
        ("pooling_mode_mean_tokens", PoolingMode::Mean),
        ("pooling_mode_mean_sqrt_len_tokens", PoolingMode::MeanSqrtLen),
        ("pooling_mode_weightedmean_tokens", PoolingMode::WeightedMean),
        ("pooling_mode_lasttoken", PoolingMode::Last),
    ];
    for key in file.keys().filter(|key| key.starts_with("pooling_mode")) {
        if !FLAGS.iter().any(|(flag, _)| *flag == key) && file.flag(key, false, problems) {
            problems.push(file.complaint(key, "is not supported"));
        }
    }
    FLAGS.iter().filter(|(flag, _)| file.flag(flag, false, problems)).map(|(_, mode)| *mode).collect()
}

impl DenseConfig {
    /// Reads the file in `folder`.
    fn read(folder: PathBuf, problems: &mut Problems) -> Result<Self> {
        let file = JsonObject::read(&folder.join("config.json"))?;
        check_names(&file, problems);
        if file.flag("use_residual", false, problems) {
            problems.push(file.complaint("use_residual", "is not supported"));
        }
        for key in ["in_features", "out_features"] {
            if file.get(key).is_none() {
                problems.push(file.complaint(key, "is needed"));
            }
        }
        Ok(Self {
            in_features: file.size("in_features", 1, 1, MAX_WIDTH, problems),
            out_features: file.size("out_features", 1, 1, MAX_WIDTH, problems),
            bias: file.flag("bias", true, problems),
            activation: dense_activation(&file, problems),
            folder,
        })
    }
}

/// The activation, given as a torch class; Tanh when the file has none.
fn dense_activation(file: &JsonObject, problems: &mut Problems) -> Activation {
    let class = file.text("activation_function", "torch.nn.modules.activation.Tanh", problems);
    let name = class.starts_with("torch.nn.").then(|| class.rsplit('.').next().unwrap_or_default());
    match name {
        Some("Identity") => Activation::Identity,
        Some("Tanh") => Activation::Tanh,
        Some("ReLU") => Activation::Relu,
        Some("GELU") => Activation::Gelu,
        Some("Sigmoid") => Activation::Sigmoid,
        Some("SiLU") => Activation::Silu,
        _ => {
            problems.push(file.complaint("activation_function", "is not supported"));
            Activation::Identity
        }
    }
}

/// A Normalize module may have a file that says what it normalises.
fn check_normalize(folder: &Path, problems: &mut Problems) -> Result<()> {
    let path = folder.join("config.json");
    if path.exists() {
        check_names(&JsonObject::read(&path)?, problems);
    }
    Ok(())
}

/// Modules after the pooling must work on the sentence embedding.
fn check_names(file: &JsonObject, problems: &mut Problems) {
    for key in ["module_input_name", "module_output_name"] {
        if file.text(key, "sentence_embedding", problems) != "sentence_embedding" {
            problems.push(file.complaint(key, "is not supported"));
        }
    }
}

/// The transformer must give hidden states or class logits.
fn check_task(folder: &Path, problems: &mut Problems) -> Result<()> {
    let path = folder.join("sentence_bert_config.json");
    if path.exists() {
        let file = JsonObject::read(&path)?;
        let task = file.text("transformer_task", "feature-extraction", problems);
        if !["feature-extraction", "sequence-classification"].contains(&task) {
            problems.push(file.complaint("transformer_task", "is not supported"));
        }
    }
    Ok(())
}

/// The module's kind, if its class is one of sentence-transformers' that the engine knows, wherever it lived over the
/// years.
fn kind(type_name: &str) -> Option<&str> {
    let kind = type_name.strip_prefix("sentence_transformers.")?.rsplit('.').next()?;
    ["Transformer", "Pooling", "Dense", "Normalize"].contains(&kind).then_some(kind)
}

/// The path, if it stays inside the folder that it is relative to.
fn inside(path: &str) -> Option<PathBuf> {
    let path = Path::new(path);
    let is_inside = path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    is_inside.then(|| path.to_owned())
}
