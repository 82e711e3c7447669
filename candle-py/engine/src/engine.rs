//! The engine: a loaded model and the threads that run it. Takes token ids; knows nothing of text.

use std::path::Path;
use std::sync::Arc;

use crate::backend::{After, Backend, CpuBackend};
use crate::batch::{Chunk, Ragged};
use crate::blueprint::{Blueprint, DENSE_LAYER};
use crate::config::SentenceModule;
use crate::cpu::{Activation, Isa, Kernels, Storage};
use crate::error::{Error, Result};
use crate::info::Info;
use crate::models::{Classifier, Decoder, Network, Scratch};
use crate::pooling::Pooling;
use crate::session::DecoderSession;
use crate::weights::{Layers, Loader, Source};
use crate::workers::{Workers, available_threads};

/// Tokens that one thread carries through the network at a time: enough to use a weight well while it is in the cache,
/// few enough for the activations to stay there too.
const CHUNK_TOKENS: usize = 256;

/// Fewer tokens are not worth a thread of their own.
const LEAST_CHUNK_TOKENS: usize = 64;

/// How to load a model.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Threads at most; never more than the process may use, which is the default.
    pub threads: Option<usize>,
    /// The instruction set; the best that the machine has by default.
    pub isa: Option<Isa>,
    /// How weights are held; float32 by default. Arithmetic is float32 either way.
    pub storage: Storage,
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
}

impl Engine {
    /// Loads the model in `dir`: `config.json`, safetensors, and sentence-transformers' files where there are any.
    /// `dir` may also be a GGUF file, or a folder that holds one and no `config.json`; its tensors are dequantised.
    ///
    /// # Errors
    /// [`Error::Model`] when the folder does not hold a whole model of a supported kind, before anything is allocated;
    /// [`Error::Device`] when the machine lacks the instruction set; [`Error::Input`] for zero threads.
    pub fn load(dir: &Path, options: &LoadOptions) -> Result<Self> {
        let threads = match options.threads {
            Some(0) => return Err(Error::input("threads must be at least 1: `0`")),
            given => given.unwrap_or(usize::MAX).min(available_threads()),
        };
        let isa = options.isa.unwrap_or_else(Isa::detected);
        let kernels = Kernels::new(isa).ok_or_else(|| {
            Error::device(format!("this machine lacks the instruction set: `{}`", isa.name()))
                .with_hint(format!("the best that it has: {}", Isa::detected().name()))
        })?;
        let blueprint = Blueprint::read(dir)?;
        let mut info = Info::of(&blueprint);
        info.weight_bytes = info.parameters * options.storage.size_bytes();
        let backend = CpuBackend::new(kernels, options.storage);
        let Blueprint { config, prefix, checkpoint, .. } = &blueprint;
        let mut loader = Loader::new(checkpoint, &backend);
        let network = Arc::new(Network::build(&config.network, prefix, &mut loader)?);
        let classifier = match &config.labels {
            Some(labels) => Some(Classifier::build(&config.network, prefix, labels.names.len(), &mut loader)?),
            None => None,
        };
        let modules = load_modules(&blueprint, &backend)?;
        let workers = Arc::new(Workers::new(threads)?);
        Ok(Self { info, isa, storage: options.storage, threads, backend, network, classifier, modules, workers })
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
            width,
            |chunk| chunk.ids().len(),
            |backend, _, scratch, out| {
                backend.read(&scratch.hidden, width, out);
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
            width,
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
            labels.len(),
            |chunk| chunk.rows(),
            |backend, chunk, scratch, out| {
                let logits = classifier.forward(backend, chunk, scratch);
                backend.read(logits, labels.len(), out);
            },
        )
    }

    /// The logits of every token over the vocabulary, `(tokens, vocab_size)`.
    ///
    /// # Errors
    /// [`Error::Input`] when the batch does not fit the model or the model is no language model.
    pub fn logits(&self, batch: &Ragged<'_>) -> Result<Output> {
        let head = self.language_head()?;
        let width = self.info.vocab_size;
        self.run(
            batch,
            width,
            |chunk| chunk.ids().len(),
            |backend, chunk, scratch, out| backend.project_out(head, &scratch.hidden, 0..chunk.ids().len(), out),
        )
    }

    /// The logarithm of the probability of every token after those before it, `(tokens, 1)`; 0 for the first of a
    /// sequence, which nothing comes before. The logits of a few tokens are in memory at a time.
    ///
    /// # Errors
    /// [`Error::Input`] when the batch does not fit the model or the model is no language model.
    pub fn token_logprobs(&self, batch: &Ragged<'_>) -> Result<Output> {
        let head = self.language_head()?;
        self.run(
            batch,
            1,
            |chunk| chunk.ids().len(),
            |backend, chunk, scratch, out| {
                let Scratch { hidden, inner, .. } = scratch;
                for bounds in chunk.offsets().windows(2) {
                    let (first, last) = (bounds[0], bounds[1] - 1);
                    out[first] = 0.0;
                    let targets = &chunk.ids()[first + 1..=last];
                    backend.log_probabilities(head, hidden, first..last, targets, inner, &mut out[first + 1..=last]);
                }
            },
        )
    }

    /// A session that generates: the model with a cache of its own, without blocks at first. Any number of sessions may
    /// live beside each other and beside the engine, whose weights and threads they share.
    ///
    /// # Errors
    /// [`Error::Input`] when the model is no language model.
    pub fn session(&self) -> Result<DecoderSession> {
        self.language_head()?;
        DecoderSession::new(
            &self.info,
            Arc::clone(&self.network),
            self.backend,
            Arc::clone(&self.workers),
            self.threads,
        )
    }

    /// The layer that gives logits.
    fn language_head(&self) -> Result<&<CpuBackend as Layers>::Linear> {
        self.network.decoder().and_then(Decoder::head).ok_or_else(|| {
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

    /// Runs the network over the batch, chunk by chunk; `finish` writes a chunk's rows, `rows_of` says how many.
    fn run(
        &self,
        batch: &Ragged<'_>,
        width: usize,
        rows_of: impl Fn(&Chunk<'_>) -> usize,
        finish: impl Fn(&CpuBackend, &Chunk<'_>, &mut Scratch<<CpuBackend as Backend>::Buffer>, &mut [f32]) + Send + Sync,
    ) -> Result<Output> {
        batch.check(&self.info.limits())?;
        let chunks = batch.chunks(|left| next_chunk_tokens(left, self.threads));
        let mut data = vec![0.0; chunks.iter().map(&rows_of).sum::<usize>() * width];
        let mut rest = data.as_mut_slice();
        let mut work = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            let (out, later) = rest.split_at_mut(rows_of(&chunk) * width);
            rest = later;
            work.push((chunk, out));
        }
        let backend = self.backend.spread(work.len() < self.threads);
        self.workers.run(work, |(chunk, out), scratch| {
            self.network.forward(&backend, &chunk, scratch);
            finish(&backend, &chunk, scratch, out);
        });
        let is_bad = |row: &[f32]| row.iter().any(|value| !value.is_finite());
        let bad_rows =
            data.chunks_exact(width).enumerate().filter(|(_, row)| is_bad(row)).map(|(row, _)| row).collect();
        Ok(Output { data, width, bad_rows })
    }
}

/// Tokens of the next chunk where `left` are left: full chunks first, smaller ones towards the end, so that no thread
/// waits long for the last one of another (guided self-scheduling, Polychronopoulos and Kuck 1987).
fn next_chunk_tokens(left: usize, threads: usize) -> usize {
    if threads == 1 { CHUNK_TOKENS } else { left.div_ceil(2 * threads).clamp(LEAST_CHUNK_TOKENS, CHUNK_TOKENS) }
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
