//! A model folder, or a GGUF file, read and checked as a whole, before any weight is: configuration, module chain, and every tensor's
//! name, shape and dtype. Loading and inspecting both start here, so that what one refuses the other refuses too.

use std::path::Path;

use crate::config::{LanguageHead, ModelConfig, NetworkConfig, SentenceConfig, SentenceModule, read_gguf_config};
use crate::error::{Problems, Result};
use crate::gguf::{GgufFile, find_gguf};
use crate::models::{self, Classifier, Network};
use crate::weights::{Checkpoint, Declaration, Declared, Extras, Source};

/// A model that is known to fit together.
#[derive(Debug)]
pub struct Blueprint {
    /// The transformer's configuration.
    pub config: ModelConfig,
    /// The way from hidden states to an embedding.
    pub sentence: SentenceConfig,
    /// What the network's tensor names begin with.
    pub prefix: &'static str,
    /// The transformer's tensors.
    pub checkpoint: Checkpoint,
    /// The tensors of each Dense module, in order.
    pub dense: Vec<Checkpoint>,
    /// Numbers in all tensors that the model uses.
    pub parameters: usize,
    /// Those of them in tables of embeddings.
    pub table_parameters: usize,
}

/// The name of a Dense module's layer in its own files.
pub const DENSE_LAYER: &str = "linear";

impl Blueprint {
    /// Reads the folder, or the GGUF file, at `path`.
    ///
    /// # Errors
    /// A file that is missing or damaged; else all that does not fit, told together.
    pub fn read(path: &Path) -> Result<Self> {
        let mut problems = Problems::default();
        let gguf = find_gguf(path)?.map(|file| GgufFile::open(&file)).transpose()?;
        let sentence = match &gguf {
            Some(file) => SentenceConfig::read_gguf(path, file, &mut problems)?,
            None => SentenceConfig::read(path, &mut problems)?,
        };
        let transformer = path.join(&sentence.transformer_path);
        let mut config = match &gguf {
            Some(file) => ModelConfig::of(&read_gguf_config(file)?, &mut problems)?,
            None => ModelConfig::read(&transformer, &mut problems)?,
        };
        if sentence.pooling.is_some() {
            drop_separate_head(&mut config);
        }
        sentence.check_widths(config.network.hidden_size(), &mut problems);
        problems.into_result(path)?;

        let mut problems = Problems::default();
        let checkpoint = gguf.map_or_else(|| Checkpoint::open(&transformer), Checkpoint::from_gguf)?;
        let prefix = models::prefix(&config.network, &checkpoint);
        let mut declaration = Declaration::default();
        Network::<Declared>::build(&config.network, prefix, &mut declaration)?;
        if let Some(labels) = &config.labels {
            Classifier::<Declared>::build(&config.network, prefix, labels.names.len(), &mut declaration)?;
        }
        let extras = models::extras(&config.network, prefix, config.labels.is_some());
        declaration.check(&checkpoint, &extras, &mut problems);
        let (mut parameters, table_parameters) = (declaration.parameters(), declaration.table_parameters());

        let mut dense = Vec::new();
        for module in &sentence.modules {
            if let SentenceModule::Dense(config) = module {
                let checkpoint = Checkpoint::open(&config.folder)?;
                let mut declaration = Declaration::default();
                declaration.linear(&[DENSE_LAYER], config.out_features, config.in_features, config.bias)?;
                declaration.check(&checkpoint, &Extras::default(), &mut problems);
                parameters += declaration.parameters();
                dense.push(checkpoint);
            }
        }
        problems.into_result(path)?;
        Ok(Self { config, sentence, prefix, checkpoint, dense, parameters, table_parameters })
    }
}

/// A model for embeddings has no use for a language model's own head, which its files often leave out.
fn drop_separate_head(config: &mut ModelConfig) {
    if let NetworkConfig::Decoder(decoder) = &mut config.network {
        decoder.head = decoder.head.filter(|head| *head == LanguageHead::Tied);
    }
}
