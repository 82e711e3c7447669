//! The engine: a loaded model, or a rank's part of one, on the device that was asked for. Takes token ids; knows nothing of
//! text.

mod follow;
mod forward;
mod model;

use std::path::Path;
use std::sync::Arc;

use self::model::Model;
use crate::backend::{CpuBackend, TensorBackend};
use crate::batch::Ragged;
use crate::comm::{Communicator, DeviceCommunicator};
use crate::cpu::{Isa, Kernels, Storage};
use crate::error::{Error, Result};
use crate::info::Info;
use crate::placement::{Device, Dtype};
use crate::pooling::Pooling;
use crate::session::DecoderSession;
use crate::workers::available_threads;

/// How to load a model.
#[derive(Clone, Debug, Default)]
pub struct LoadOptions {
    /// Threads of the CPU at most; never more than the process may use, which is the default.
    pub threads: Option<usize>,
    /// The instruction set of what is computed on the CPU; the best that the machine has for the dtype by default.
    pub isa: Option<Isa>,
    /// How weights are held; float32 by default. Sums are float32 either way; on
    /// AMX, bfloat16 weights meet rows rounded to bfloat16.
    pub dtype: Dtype,
    /// Where the model computes; the CPU by default.
    pub device: Device,
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

/// A loaded model.
pub struct Engine {
    isa: Isa,
    dtype: Dtype,
    device: Device,
    model: AnyModel,
}

/// The model on one of the backends. Which is decided once; nothing inside asks again.
enum AnyModel {
    Cpu(Box<Model<CpuBackend>>),
    Tensors(Box<Model<TensorBackend>>),
}

/// `$call` with the engine's model as `$model`, whatever its backend.
macro_rules! with_model {
    ($engine:expr, $model:ident => $call:expr) => {
        match &$engine.model {
            AnyModel::Cpu($model) => $call,
            AnyModel::Tensors($model) => $call,
        }
    };
}
use with_model;

impl Engine {
    /// Loads the model in `dir`: `config.json`, safetensors, and sentence-transformers' files where there are any.
    /// `dir` may also be a GGUF file, or a folder that holds one and no `config.json`; its tensors are dequantised.
    ///
    /// # Errors
    /// [`Error::Model`] when the folder does not hold a whole model of a supported kind, before anything is allocated;
    /// [`Error::Device`] when the machine lacks the device, its memory or the instruction set; [`Error::Input`] for zero
    /// threads, and for a model that cannot be split over the ranks; [`Error::Communicator`] when a rank fails to load it,
    /// on all others.
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
        let LoadOptions { dtype, device, .. } = *options;
        let storage = if device == Device::Cpu { dtype.storage()? } else { Storage::Float32 };
        let isa = options.isa.unwrap_or_else(|| Isa::detected(storage));
        if !isa.is_for(storage) {
            return Err(Error::input(format!("instruction set is for dtype bfloat16 alone: `{}`", isa.name()))
                .with_hint("set dtype to bfloat16, or let the machine's best instruction set be chosen"));
        }
        let kernels = Kernels::new(isa).ok_or_else(|| {
            Error::device(format!("this machine lacks the instruction set: `{}`", isa.name()))
                .with_hint(format!("the best that it has: {}", Isa::detected(storage).name()))
        })?;
        let communicator = options.communicator.clone();
        let of_group = communicator.as_deref().and_then(Communicator::on_device).map(DeviceCommunicator::device);
        if let (Device::Cuda(device), Some(of_group)) = (options.device, of_group)
            && device != of_group
        {
            return Err(Error::input(format!(
                "model and communicator are on different devices, cuda:{device} and: `cuda:{of_group}`"
            ))
            .with_hint("give the engine and the NcclCommunicator the same device"));
        }
        let model = match device {
            Device::Cpu => {
                let backend = CpuBackend::new(kernels, storage);
                AnyModel::Cpu(Box::new(Model::load(dir, backend, dtype, threads, communicator)?))
            }
            Device::Tensors | Device::Cuda(_) => {
                let backend = TensorBackend::new(device.open()?, dtype)?;
                AnyModel::Tensors(Box::new(Model::load(dir, backend, dtype, threads, communicator)?))
            }
        };
        Ok(Self { isa, dtype, device, model })
    }

    /// The model's facts.
    pub fn info(&self) -> &Info {
        with_model!(self, model => &model.info)
    }

    /// The instruction set in force.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// How the weights are held.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Where the model computes.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The threads in force.
    pub fn threads(&self) -> usize {
        with_model!(self, model => model.threads)
    }

    /// The last hidden states, `(tokens, hidden_size)`.
    ///
    /// # Errors
    /// [`Error::Input`] when the batch does not fit the model.
    pub fn hidden_states(&self, batch: &Ragged<'_>) -> Result<Output> {
        with_model!(self, model => model.hidden_states(batch))
    }

    /// One embedding per sequence, `(rows, width)`: pooled, through the model's Dense modules, cut, normalised.
    ///
    /// # Errors
    /// [`Error::Input`] when the batch or the options do not fit the model, or when neither the options nor the model's
    /// files say how to pool.
    pub fn embed(&self, batch: &Ragged<'_>, options: &EmbedOptions) -> Result<Output> {
        with_model!(self, model => model.embed(batch, options))
    }

    /// The logits of every sequence, `(rows, labels)`.
    ///
    /// # Errors
    /// [`Error::Input`] when the batch does not fit the model or the model is no classifier.
    pub fn classify(&self, batch: &Ragged<'_>) -> Result<Output> {
        with_model!(self, model => model.classify(batch))
    }

    /// The logits of every token over the vocabulary, `(tokens, vocab_size)`.
    ///
    /// # Errors
    /// [`Error::Input`] when the batch does not fit the model or the model is no language model.
    pub fn logits(&self, batch: &Ragged<'_>) -> Result<Output> {
        with_model!(self, model => model.logits(batch))
    }

    /// The logarithm of the probability of every token after those before it, `(tokens, 1)`; 0 for the first of a
    /// sequence, which nothing comes before. The logits of a few tokens are in memory at a time.
    ///
    /// # Errors
    /// [`Error::Input`] when the batch does not fit the model or the model is no language model.
    pub fn token_logprobs(&self, batch: &Ragged<'_>) -> Result<Output> {
        with_model!(self, model => model.token_logprobs(batch))
    }

    /// A session that generates: the model with a cache of its own, without blocks at first. Any number of sessions may
    /// live beside each other and beside the engine, whose weights and threads they share.
    ///
    /// # Errors
    /// [`Error::Input`] when the model is no language model.
    pub fn session(&self) -> Result<DecoderSession> {
        match &self.model {
            AnyModel::Cpu(model) => model.session().map(DecoderSession::from),
            AnyModel::Tensors(model) => model.session().map(DecoderSession::from),
        }
    }
}
