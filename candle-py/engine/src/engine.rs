//! The engine: a loaded model, or a rank's part of one, and the threads that run it. Takes token ids; knows nothing of text.

mod follow;
mod forward;

use std::path::Path;
use std::sync::Arc;

use crate::backend::{After, Backend, CpuBackend};
use crate::batch::Ragged;
use crate::blueprint::{Blueprint, DENSE_LAYER};
use crate::comm::Communicator;
use crate::config::SentenceModule;
use crate::cpu::{Activation, Isa, Kernels, Storage};
use crate::error::{Error, Result};
use crate::group::Group;
use crate::info::Info;
use crate::models::{Classifier, Decoder, Network, Scratch};
use crate::orders::Wanted;
use crate::pooling::Pooling;
use crate::session::DecoderSession;
use crate::shard::Shard;
use crate::weights::{Layers, Loader, Source};
use crate::workers::{Workers, available_threads};

/// How to load a model.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Threads at most; never more than the process may use, which is the default.
    pub threads: Option<usize>,
    /// The instruction set; the best that the machine has for the storage by default.
    pub isa: Option<Isa>,
    /// How weights are held; float32 by default. Arithmetic is float32 either way, but for products on AMX: there
    /// bfloat16 weights meet rows rounded to bfloat16, and their sums are float32.
    pub storage: Storage,
    /// The ranks that the model is split over, of which this process is one. All load it with the same options; then the
    /// engine of rank 0 is asked, and the others [follow](Engine::follow). None for the whole model here.
    pub communicator: Option<Arc<dyn Communicator>>,
}

/// How to make embeddings; `None` is what the model's files say.
#[derive(Clone, Debug, Default)]
pub struct EmbedOptions {
    /// How tokens become one row.
    pub pooling: Option<Pooling>,
    /// Whether rows end divided by their Euclidean norm.
    pub normalize: Option<bool>,
    /// The first so many numbers of each row are kept (before normalising).
    pub dimensions: Option<usize>,
    /// Tokens at the start of each row that are left out of the pooling.
    pub skip_tokens: usize,
}

/// Rows of float32.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Output {
    /// The numbers, row-major.
    pub data: Vec<f32>,
    /// Numbers in a row.
    pub width: usize,
    /// Rows that hold NaN or infinity, or that could not be normalised because they are zero.
    pub bad_rows: Vec<usize>,
}

impl Output {
    /// Rows.
    pub fn rows(&self) -> usize {
        self.data.len().checked_div(self.width).unwrap_or(0)
    }
}

/// A module after the pooling that has weights, or works in the middle of the chain.
enum Module<L: Layers> {
    Dense(L::Linear, Activation),
    Normalize,
}

/// A loaded model.
pub struct Engine {
    info: Info,
    isa: Isa,
    storage: Storage,
    threads: usize,
    backend: CpuBackend,
    network: Arc<Network<CpuBackend>>,
    classifier: Option<Classifier<CpuBackend>>,
    modules: Vec<Module<CpuBackend>>,
    workers: Arc<Workers<Scratch<<CpuBackend as Backend>::Buffer>>>,
    group: Option<Arc<Group>>,
}

impl Engine {
    /// Loads the model in `dir`: `config.json`, safetensors, and sentence-transformers' files where there are any.
    /// `dir` may also be a GGUF file, or a folder that holds one and no `config.json`; its tensors are dequantised.
    ///
    /// # Errors
    /// [`Error::Model`] when the folder does not hold a whole model of a supported kind, before anything is allocated;
    /// [`Error::Device`] when the machine lacks the instruction set; [`Error::Input`] for zero threads, and for a model
    /// that cannot be split over the ranks; [`Error::Communicator`] when a rank fails to load it, on all others.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self> {
        let result = Self::load_part(dir, options);
        if let (Some(communicator), Err(error)) = (&options.communicator, &result) {
            communicator.abort(&format!("rank {} has not loaded the model: {error}", communicator.rank()));
        }
        result
    }

    fn load_part(dir: &Path, options: &LoadOptions) -> Result<Self> {
        let threads = match options.threads {
            Some(0) => return Err(Error::input("threads must be at least 1: `0`")),
            given => given.unwrap_or(usize::MAX).min(available_threads()),
        };
        let isa = options.isa.unwrap_or_else(|| Isa::detected(options.storage));
        if !isa.is_for(options.storage) {
            return Err(Error::input(format!("instruction set is for dtype bfloat16 alone: `{}`", isa.name()))
                .with_hint("set dtype to bfloat16, or let the machine's best instruction set be chosen"));
        }
        let kernels = Kernels::new(isa).ok_or_else(|| {
            Error::device(format!("this machine lacks the instruction set: `{}`", isa.name()))
                .with_hint(format!("the best that it has: {}", Isa::detected(options.storage).name()))
        })?;
        let blueprint = Blueprint::read(dir)?;
        let mut info = Info::of(&blueprint);
        info.weight_bytes = info.parameters * options.storage.size_bytes();
        let mut backend = CpuBackend::new(kernels, options.storage);
        let communicator = options.communicator.clone().filter(|communicator| communicator.world() > 1);
        if let Some(communicator) = &communicator {
            backend = backend.within(Arc::clone(communicator));
        }
        let Blueprint { config, prefix, checkpoint, .. } = &blueprint;
        let mut loader = Loader::new(checkpoint, &backend);
        let network = match &communicator {
            None => Network::build(&config.network, prefix, &mut loader)?,
            Some(communicator) => {
                let shard = Shard { rank: communicator.rank(), world: communicator.world() };
                let part = config.network.split(shard)?;
                loader = loader.of_part(config.network.sizes(), shard);
                Network::build(&part, prefix, &mut loader)?
            }
        };
        let network = Arc::new(network);
        let classifier = match &config.labels {
            Some(labels) => Some(Classifier::build(&config.network, prefix, labels.names.len(), &mut loader)?),
            None => None,
        };
        let modules = load_modules(&blueprint, &backend)?;
        let workers = Arc::new(Workers::new(threads)?);
        let group = communicator.map(|communicator| Arc::new(Group::new(communicator)));
        if let Some(group) = &group {
            group.compare(&format!("{:?} {:?} {}", config.network, info, options.storage.name()))?;
        }
        Ok(Self { info, isa, storage: options.storage, threads, backend, network, classifier, modules, workers, group })
    }

    /// The model's facts.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// The instruction set in force.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// How the weights are held.
    pub fn storage(&self) -> Storage {
        self.storage
    }

    /// The threads in force.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The last hidden states, `(tokens, hidden_size)`.
    ///
    /// # Errors
    /// [`Error::Input`] when the batch does not fit the model.
    pub fn hidden_states(&self, batch: &Ragged<'_>) -> Result<Output> {
        let width = self.info.hidden_size;
        self.run(
            batch,
            (width, Wanted::Hidden),
            |chunk| chunk.ids().len(),
            |backend, _, scratch, out| {
                backend.read(&scratch.hidden, width, out);
                Ok(())
            },
        )
    }

    /// One embedding per sequence, `(rows, width)`: pooled, through the model's Dense modules, cut, normalised.
    ///
    /// # Errors
    /// [`Error::Input`] when the batch or the options do not fit the model, or when neither the options nor the model's
    /// files say how to pool.
    pub fn embed(&self, batch: &Ragged<'_>, options: &EmbedOptions) -> Result<Output> {
        let pooling = options.pooling.as_ref().or(self.info.pooling.as_ref()).ok_or_else(|| {
            Error::input("the model's files do not say how to pool: `auto`")
                .with_hint("set task.pooling, to mean or cls for most models")
        })?;
        let normalize = options.normalize.unwrap_or(self.info.normalize);
        let width = self.embedding_width(pooling, options.dimensions)?;
        let mut output = self.run(
            batch,
            (width, Wanted::Hidden),
            |chunk| chunk.rows(),
            |backend, chunk, scratch, out| {
                let [pooled, other] = &mut scratch.pooled;
                backend.pool(pooling, chunk.offsets(), options.skip_tokens, &scratch.hidden, pooled);
                for module in &self.modules {
                    match module {
                        Module::Dense(linear, activation) => {
                            backend.project(linear, pooled, After::Activation(*activation), other);
                            std::mem::swap(pooled, other);
                        }
                        Module::Normalize => backend.l2_normalize(pooled),
                    }
                }
                backend.read(pooled, width, out);
                Ok(())
            },
        )?;
        if normalize {
            normalize_rows(&mut output);
        }
        Ok(output)
    }

    /// The logits of every sequence, `(rows, labels)`.
    ///
    /// # Errors
    /// [`Error::Input`] when the batch does not fit the model or the model is no classifier.
    pub fn classify(&self, batch: &Ragged<'_>) -> Result<Output> {
        let (Some(classifier), Some(labels)) = (&self.classifier, &self.info.labels) else {
            return Err(Error::input(format!("model has no classification head: `{}`", self.info.architecture)));
        };
        self.run(
            batch,
            (labels.len(), Wanted::Hidden),
            |chunk| chunk.rows(),
            |backend, chunk, scratch, out| {
                let logits = classifier.forward(backend, chunk, scratch);
                backend.read(logits, labels.len(), out);
                Ok(())
            },
        )
    }

    /// The logits of every token over the vocabulary, `(tokens, vocab_size)`.
    ///
    /// # Errors
    /// [`Error::Input`] when the batch does not fit the model or the model is no language model.
    pub fn logits(&self, batch: &Ragged<'_>) -> Result<Output> {
        let decoder = self.language_model()?;
        self.run(
            batch,
            (self.info.vocab_size, Wanted::Logits),
            |chunk| chunk.ids().len(),
            |backend, chunk, scratch, out| decoder.logits(backend, &scratch.hidden, 0..chunk.ids().len(), out),
        )
    }

    /// The logarithm of the probability of every token after those before it, `(tokens, 1)`; 0 for the first of a
    /// sequence, which nothing comes before. The logits of a few tokens are in memory at a time.
    ///
    /// # Errors
    /// [`Error::Input`] when the batch does not fit the model or the model is no language model.
    pub fn token_logprobs(&self, batch: &Ragged<'_>) -> Result<Output> {
        let decoder = self.language_model()?;
        self.run(
            batch,
            (1, Wanted::LogProbabilities),
            |chunk| chunk.ids().len(),
            |backend, chunk, scratch, out| decoder.log_probabilities(backend, chunk, scratch, out),
        )
    }

    /// A session that generates: the model with a cache of its own, without blocks at first. Any number of sessions may
    /// live beside each other and beside the engine, whose weights and threads they share.
    ///
    /// # Errors
    /// [`Error::Input`] when the model is no language model.
    pub fn session(&self) -> Result<DecoderSession> {
        let session = self.local_session()?;
        match &self.group {
            Some(group) => session.leading(group),
            None => Ok(session),
        }
    }

    /// A session on this rank alone.
    fn local_session(&self) -> Result<DecoderSession> {
        self.language_model()?;
        let (network, workers) = (Arc::clone(&self.network), Arc::clone(&self.workers));
        DecoderSession::new(&self.info, network, &self.backend, workers, self.threads)
    }

    /// The decoder, which has a head.
    fn language_model(&self) -> Result<&Decoder<CpuBackend>> {
        self.network.decoder().filter(|decoder| decoder.head().is_some()).ok_or_else(|| {
            Error::input(format!("model has no language model head: `{}`", self.info.architecture))
                .with_hint("generation and scoring need a model whose architecture ends with ForCausalLM")
        })
    }

    /// Width of an embedding under these options.
    fn embedding_width(&self, pooling: &Pooling, dimensions: Option<usize>) -> Result<usize> {
        let whole = self.info.embedding_width(pooling)?;
        match dimensions {
            Some(0) => Err(Error::input("dimensions must be at least 1: `0`")),
            Some(cut) if cut > whole => {
                Err(Error::input(format!("dimensions are more than the {whole} of the model: `{cut}`")))
            }
            Some(cut) => Ok(cut),
            None => Ok(whole),
        }
    }
}

/// The modules after the pooling, without a norm at the end, which the caller may ask for or not.
fn load_modules(blueprint: &Blueprint, backend: &CpuBackend) -> Result<Vec<Module<CpuBackend>>> {
    let sentence = &blueprint.sentence;
    let mut checkpoints = blueprint.dense.iter();
    let count = sentence.modules.len() - usize::from(sentence.ends_normalized());
    let load = |module: &SentenceModule| match module {
        SentenceModule::Normalize => Ok(Module::Normalize),
        SentenceModule::Dense(config) => {
            let checkpoint = checkpoints.next().ok_or_else(|| Error::internal("a Dense module without weights"))?;
            let (input, output) = (config.in_features, config.out_features);
            let linear = Loader::new(checkpoint, backend).linear(&[DENSE_LAYER], output, input, config.bias)?;
            Ok(Module::Dense(linear, config.activation))
        }
    };
    sentence.modules[..count].iter().map(load).collect()
}

/// Divides each row by its Euclidean norm, which is summed in f64; rows without a direction are noted.
fn normalize_rows(output: &mut Output) {
    /// The least divisor, as in torch's `normalize`.
    const LEAST_NORM: f64 = 1e-12;
    for (index, row) in output.data.chunks_exact_mut(output.width).enumerate() {
        let norm = row.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
        if norm < LEAST_NORM {
            output.bad_rows.push(index);
        }
        let divisor = norm.max(LEAST_NORM);
        row.iter_mut().for_each(|value| *value = (f64::from(*value) / divisor) as f32);
    }
    output.bad_rows.sort_unstable();
}
