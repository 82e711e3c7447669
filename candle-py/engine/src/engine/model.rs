//! A loaded model on one backend, and what can be asked of it. Knows no device by name.

use std::path::Path;
use std::sync::Arc;

use super::{EmbedOptions, Output};
use crate::backend::{After, Backend};
use crate::batch::Ragged;
use crate::blueprint::{Blueprint, DENSE_LAYER};
use crate::comm::Communicator;
use crate::config::SentenceModule;
use crate::cpu::Activation;
use crate::error::{Error, Result};
use crate::group::Group;
use crate::info::Info;
use crate::models::{Classifier, Decoder, Network, Scratch};
use crate::orders::Wanted;
use crate::placement::Dtype;
use crate::pooling::Pooling;
use crate::session::Session;
use crate::shard::Shard;
use crate::weights::{Layers, Loader, Source};
use crate::workers::Workers;

/// A module after the pooling that has weights, or works in the middle of the chain.
enum Module<L: Layers> {
    Dense(L::Linear, Activation),
    Normalize,
}

/// A model on a backend.
pub(super) struct Model<B: Backend> {
    pub(super) info: Info,
    pub(super) threads: usize,
    pub(super) backend: B,
    pub(super) network: Arc<Network<B>>,
    classifier: Option<Classifier<B>>,
    modules: Vec<Module<B>>,
    pub(super) workers: Arc<Workers<Scratch<B::Buffer>>>,
    pub(super) group: Option<Arc<Group>>,
}

impl<B: Backend> Model<B> {
    /// Reads the model in `dir` into `backend`, or the part of it that is this rank's.
    pub(super) fn load(
        dir: &Path,
        mut backend: B,
        dtype: Dtype,
        threads: usize,
        communicator: Option<Arc<dyn Communicator>>,
    ) -> Result<Self> {
        let blueprint = Blueprint::read(dir)?;
        let mut info = Info::of(&blueprint);
        info.weight_bytes = dtype.weight_bytes(blueprint.parameters, blueprint.table_parameters);
        let communicator = communicator.filter(|communicator| communicator.world() > 1);
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
            group.compare(&format!("{:?} {:?} {}", config.network, info, dtype.name()))?;
        }
        Ok(Self { info, threads, backend, network, classifier, modules, workers, group })
    }

    pub(super) fn hidden_states(&self, batch: &Ragged<'_>) -> Result<Output> {
        let width = self.info.hidden_size;
        self.run(
            batch,
            (width, Wanted::Hidden),
            |chunk| chunk.ids().len(),
            |backend, _, scratch, out| backend.read(&scratch.hidden, width, out),
        )
    }

    pub(super) fn embed(&self, batch: &Ragged<'_>, options: &EmbedOptions) -> Result<Output> {
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
                backend.pool(pooling, chunk.offsets(), options.skip_tokens, &scratch.hidden, pooled)?;
                for module in &self.modules {
                    match module {
                        Module::Dense(linear, activation) => {
                            backend.project(linear, pooled, After::Activation(*activation), other)?;
                            std::mem::swap(pooled, other);
                        }
                        Module::Normalize => backend.l2_normalize(pooled)?,
                    }
                }
                backend.read(pooled, width, out)
            },
        )?;
        if normalize {
            normalize_rows(&mut output);
        }
        Ok(output)
    }

    pub(super) fn classify(&self, batch: &Ragged<'_>) -> Result<Output> {
        let (Some(classifier), Some(labels)) = (&self.classifier, &self.info.labels) else {
            return Err(Error::input(format!("model has no classification head: `{}`", self.info.architecture)));
        };
        self.run(
            batch,
            (labels.len(), Wanted::Hidden),
            |chunk| chunk.rows(),
            |backend, chunk, scratch, out| {
                let logits = classifier.forward(backend, chunk, scratch)?;
                backend.read(logits, labels.len(), out)
            },
        )
    }

    pub(super) fn logits(&self, batch: &Ragged<'_>) -> Result<Output> {
        let decoder = self.language_model()?;
        self.run(
            batch,
            (self.info.vocab_size, Wanted::Logits),
            |chunk| chunk.ids().len(),
            |backend, chunk, scratch, out| decoder.logits(backend, &scratch.hidden, 0..chunk.ids().len(), out),
        )
    }

    pub(super) fn token_logprobs(&self, batch: &Ragged<'_>) -> Result<Output> {
        let decoder = self.language_model()?;
        self.run(
            batch,
            (1, Wanted::LogProbabilities),
            |chunk| chunk.ids().len(),
            |backend, chunk, scratch, out| decoder.log_probabilities(backend, chunk, scratch, out),
        )
    }

    pub(super) fn session(&self) -> Result<Session<B>> {
        let session = self.local_session()?;
        match &self.group {
            Some(group) => session.leading(group),
            None => Ok(session),
        }
    }

    /// A session on this rank alone.
    pub(super) fn local_session(&self) -> Result<Session<B>> {
        self.language_model()?;
        let (network, workers) = (Arc::clone(&self.network), Arc::clone(&self.workers));
        Session::new(&self.info, network, &self.backend, workers, self.threads)
    }

    /// The decoder, which has a head.
    pub(super) fn language_model(&self) -> Result<&Decoder<B>> {
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
fn load_modules<B: Backend>(blueprint: &Blueprint, backend: &B) -> Result<Vec<Module<B>>> {
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
