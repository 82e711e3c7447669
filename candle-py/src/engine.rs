//! `Engine` and the module's functions: arguments in, engine calls without the GIL, results and facts out.

use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use candle_engine::cpu::{BytePath, Isa, Storage};
use candle_engine::{
    Device, Dtype, EmbedOptions, Error, Info, LoadOptions, Pooling, Ragged, Slice, catching_panics, has_cuda,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::Array;
use crate::communicator;
use crate::error::{detached, to_python};
use crate::generator::Generator;
use crate::inputs::{Given, natural, numbers, optional_numbers};
use crate::process::Home;

/// How long an interrupt may wait for a thread that follows another rank.
const BETWEEN_SIGNALS: Duration = Duration::from_millis(100);

/// A loaded model, ready to run on any thread; the GIL is released while it loads and runs.
#[pyclass(frozen, module = "candle_py")]
pub struct Engine {
    engine: candle_engine::Engine,
    home: Home,
}

impl Engine {
    /// The engine, for what its threads have a part in.
    fn here(&self) -> Result<&candle_engine::Engine, Error> {
        self.home.check().map(|()| &self.engine)
    }
}

#[pymethods]
impl Engine {
    /// Loads the model in a folder.
    #[staticmethod]
    #[pyo3(signature = (model_dir, *, device="cpu", dtype="auto", threads=None, cpu=None, communicator=None))]
    fn load(
        py: Python<'_>,
        model_dir: PathBuf,
        device: &str,
        dtype: &str,
        threads: Option<Given<i64>>,
        cpu: Option<&str>,
        communicator: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let device = Device::from_name(device).map_err(|error| cuda_failure(py, &error))?;
        let dtype = Dtype::from_name(dtype, device).map_err(|error| to_python(py, &error))?;
        let options = LoadOptions {
            threads: threads.map(|threads| natural(py, "threads", threads)).transpose()?,
            isa: cpu.map(instruction_set).transpose().map_err(|error| to_python(py, &error))?,
            dtype,
            device,
            communicator: communicator.as_ref().map(communicator::taken).transpose()?,
        };
        let engine = detached(py, || candle_engine::Engine::load(&model_dir, &options))?;
        Ok(Self { home: Home::of(&engine), engine })
    }

    /// The model's facts and how it runs.
    #[getter]
    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let info = facts(py, self.engine.info())?;
        info.set_item("dtype", self.engine.dtype().name())?;
        info.set_item("device", self.engine.device().name())?;
        info.set_item("threads", self.engine.threads())?;
        let (rank, world) = self.engine.rank_and_world();
        info.set_item("rank", rank)?;
        info.set_item("world", world)?;
        info.set_item("cpu", self.engine.isa().name())?;
        Ok(info)
    }

    /// The last hidden states, (tokens, hidden_size).
    #[pyo3(signature = (ids, offsets, type_ids=None))]
    fn hidden_states(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        type_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Array> {
        let batch = Batch::new(ids, offsets, type_ids)?;
        Ok(detached(py, || self.here()?.hidden_states(&batch.ragged()))?.into())
    }

    /// One embedding per row, (rows, width).
    #[pyo3(
        signature = (ids, offsets, *, pooling="auto", normalize=None, dimensions=None, type_ids=None,
            skip_tokens=Given::Held(0)),
        text_signature = "($self, ids, offsets, *, pooling='auto', normalize='auto', dimensions=None, type_ids=None, \
                          skip_tokens=0)"
    )]
    #[allow(clippy::too_many_arguments)]
    fn embed(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        pooling: &str,
        normalize: Option<Bound<'_, PyAny>>,
        dimensions: Option<Given<i64>>,
        type_ids: Option<&Bound<'_, PyAny>>,
        skip_tokens: Given<i64>,
    ) -> PyResult<Array> {
        let batch = Batch::new(ids, offsets, type_ids)?;
        let options = EmbedOptions {
            pooling: pooling_named(pooling).map_err(|error| to_python(py, &error))?,
            normalize: normalize.map(|value| switch(&value)).transpose()?.flatten(),
            dimensions: dimensions.map(|value| natural(py, "dimensions", value)).transpose()?,
            skip_tokens: natural(py, "skip_tokens", skip_tokens)?,
        };
        Ok(detached(py, || self.here()?.embed(&batch.ragged(), &options))?.into())
    }

    /// The logits of every row, (rows, labels), before any softmax or sigmoid.
    #[pyo3(signature = (ids, offsets, type_ids=None))]
    fn classify(
        &self,
        py: Python<'_>,
        ids: &Bound<'_, PyAny>,
        offsets: &Bound<'_, PyAny>,
        type_ids: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Array> {
        let batch = Batch::new(ids, offsets, type_ids)?;
        Ok(detached(py, || self.here()?.classify(&batch.ragged()))?.into())
    }

    /// The logits of every token over the vocabulary, (tokens, vocab_size).
    fn logits(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, offsets: &Bound<'_, PyAny>) -> PyResult<Array> {
        let batch = Batch::new(ids, offsets, None)?;
        Ok(detached(py, || self.here()?.logits(&batch.ragged()))?.into())
    }

    /// The logarithm of every token's probability after those before it, (tokens, 1).
    fn token_logprobs(&self, py: Python<'_>, ids: &Bound<'_, PyAny>, offsets: &Bound<'_, PyAny>) -> PyResult<Array> {
        let batch = Batch::new(ids, offsets, None)?;
        Ok(detached(py, || self.here()?.token_logprobs(&batch.ragged()))?.into())
    }

    /// Generates tokens for many requests at a time.
    #[pyo3(
        signature = (*, max_rows=Given::Held(64), cache_bytes=None, step_tokens=Given::Held(512),
            longest_tokens=Given::Held(0), beams=Given::Held(1)),
        text_signature = "($self, *, max_rows=64, cache_bytes=None, step_tokens=512, longest_tokens=0, beams=1)"
    )]
    fn generator(
        &self,
        py: Python<'_>,
        max_rows: Given<i64>,
        cache_bytes: Option<Given<i64>>,
        step_tokens: Given<i64>,
        longest_tokens: Given<i64>,
        beams: Given<i64>,
    ) -> PyResult<Generator> {
        let engine = self.here().map_err(|error| to_python(py, &error))?;
        Generator::new(py, engine, max_rows, cache_bytes, step_tokens, (longest_tokens, beams))
    }

    /// Computes this rank's part of what the engine of rank 0 is asked for, until that is closed.
    fn follow(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            let (told, over) = channel();
            std::thread::scope(|scope| {
                scope.spawn(move || told.send(catching_panics(|| self.here()?.follow())));
                let mut interrupt = None;
                loop {
                    match over.recv_timeout(BETWEEN_SIGNALS) {
                        Ok(result) => return Ok((result, interrupt)),
                        Err(RecvTimeoutError::Disconnected) => return Err(Error::internal("a thread is gone")),
                        Err(RecvTimeoutError::Timeout) => {}
                    }
                    if interrupt.is_none()
                        && let Err(error) = Python::attach(|py| py.check_signals())
                    {
                        interrupt = Some(error);
                        self.engine.abort("a rank was interrupted");
                    }
                }
            })
        })
        .and_then(|(result, interrupt)| match interrupt {
            Some(interrupt) => Ok(Err(interrupt)),
            None => result.map(Ok),
        })
        .map_err(|error| to_python(py, &error))?
    }

    /// Ends the work of all ranks.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.here()?.close())
    }

    fn __repr__(&self) -> String {
        let info = self.engine.info();
        format!("Engine({}, hidden_size={}, layers={})", info.architecture, info.hidden_size, info.layers)
    }
}

/// A model's facts from its files alone, checked as a load checks them.
#[pyfunction]
#[pyo3(signature = (model_dir, *, pooling="auto"))]
pub fn inspect<'py>(py: Python<'py>, model_dir: PathBuf, pooling: &str) -> PyResult<Bound<'py, PyDict>> {
    let pooling = pooling_named(pooling).map_err(|error| to_python(py, &error))?;
    let info = detached(py, || candle_engine::inspect(&model_dir, pooling.as_ref()))?;
    facts(py, &info)
}

/// The part of every tensor that a rank loads: None, or the axis, the places on it, and in how many equal blocks of it
/// these are meant; a whole tensor has no axis.
#[pyfunction]
pub fn inspect_rank<'py>(
    py: Python<'py>,
    model_dir: PathBuf,
    rank: Given<i64>,
    world: Given<i64>,
) -> PyResult<Bound<'py, PyDict>> {
    let (rank, world) = (natural(py, "rank", rank)?, natural(py, "world", world)?);
    let slices = detached(py, || candle_engine::inspect_rank(&model_dir, rank, world))?;
    let found = PyDict::new(py);
    for (name, slice) in slices {
        let part = match slice {
            Slice::Nothing => None,
            Slice::Whole => Some((None, 0, 0, 1)),
            Slice::Rows(rows) => Some((Some(0), rows.start, rows.end, 1)),
            Slice::Blocks(blocks, rows) => Some((Some(0), rows.start, rows.end, blocks)),
            Slice::Columns(columns) => Some((Some(1), columns.start, columns.end, 1)),
        };
        found.set_item(name, part)?;
    }
    Ok(found)
}

/// What this build and this machine can do.
#[pyfunction]
pub fn capabilities(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let features = PyDict::new(py);
    for (name, is_there) in candle_engine::cpu_features() {
        features.set_item(name, is_there)?;
    }
    let capabilities = PyDict::new(py);
    capabilities.set_item("version", candle_engine::VERSION)?;
    capabilities.set_item("candle_version", candle_engine::CANDLE_VERSION)?;
    capabilities.set_item("cpu_features", features)?;
    capabilities.set_item("cpu", Isa::detected(Storage::Float32).name())?;
    capabilities.set_item("cpu_bfloat16", Isa::detected(Storage::Bfloat16).name())?;
    capabilities.set_item("cpu_int8", BytePath::of(Isa::detected(Storage::Int8)).name())?;
    capabilities.set_item("cuda", has_cuda())?;
    capabilities.set_item("nccl", cfg!(feature = "nccl"))?;
    capabilities.set_item("threads_default", candle_engine::available_threads())?;
    Ok(capabilities)
}

/// Converts PyTorch's pickled weights to safetensors without running the pickle.
#[pyfunction]
pub fn convert_pickle(py: Python<'_>, source: PathBuf, target_dir: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let converted = detached(py, || candle_engine::convert_pickle(&source, &target_dir))?;
    let result = PyDict::new(py);
    result.set_item("files", converted.files.iter().map(|file| file.to_string_lossy()).collect::<Vec<_>>())?;
    result.set_item("tensors", converted.tensors)?;
    result.set_item("size_bytes", converted.size_bytes)?;
    Ok(result)
}

/// The caller's batch, copied out of Python.
struct Batch {
    ids: Vec<u32>,
    offsets: Vec<u32>,
    type_ids: Option<Vec<u32>>,
}

impl Batch {
    fn new(ids: &Bound<'_, PyAny>, offsets: &Bound<'_, PyAny>, type_ids: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        Ok(Self {
            ids: numbers("ids", ids)?,
            offsets: numbers("offsets", offsets)?,
            type_ids: optional_numbers("type_ids", type_ids)?,
        })
    }

    fn ragged(&self) -> Ragged<'_> {
        Ragged { ids: &self.ids, offsets: &self.offsets, type_ids: self.type_ids.as_deref() }
    }
}

fn instruction_set(name: &str) -> Result<Isa, Error> {
    Isa::from_name(name).ok_or_else(|| {
        let names: Vec<&str> = Isa::ALL.iter().map(|isa| isa.name()).collect();
        Error::input(format!("instruction set is not known: `{name}`")).with_hint(names.join(", "))
    })
}

/// Why there is no CUDA: the reason that an installed CUDA build could not be loaded for, or else the error.
fn cuda_failure(py: Python<'_>, error: &Error) -> PyErr {
    let failure = || py.import("candle_py")?.call_method0("cuda_failure");
    match failure() {
        Ok(failure) if matches!(error, Error::Device { .. }) && !failure.is_none() => PyErr::from_value(failure),
        _ => to_python(py, error),
    }
}

/// "auto" as `None`, or modes.
fn pooling_named(name: &str) -> Result<Option<Pooling>, Error> {
    (name != "auto").then(|| name.parse()).transpose()
}

/// "auto" as `None`, or a truth value.
fn switch(value: &Bound<'_, PyAny>) -> PyResult<Option<bool>> {
    if let Ok(value) = value.extract::<bool>() {
        return Ok(Some(value));
    }
    match value.extract::<&str>() {
        Ok("auto") => Ok(None),
        _ => Err(to_python(value.py(), &Error::input(format!("normalize must be auto, True or False: `{value}`")))),
    }
}

fn facts<'py>(py: Python<'py>, info: &Info) -> PyResult<Bound<'py, PyDict>> {
    let pooling =
        info.pooling.as_ref().map(|pooling| pooling.modes().iter().map(|mode| mode.name()).collect::<Vec<_>>());
    let facts = PyDict::new(py);
    facts.set_item("architecture", &info.architecture)?;
    facts.set_item("model_type", &info.model_type)?;
    facts.set_item("kind", info.kind)?;
    facts.set_item("hidden_size", info.hidden_size)?;
    facts.set_item("layers", info.layers)?;
    facts.set_item("heads", info.heads)?;
    facts.set_item("kv_heads", info.kv_heads)?;
    facts.set_item("head_dim", info.head_dim)?;
    facts.set_item("tied", info.tied)?;
    facts.set_item("vocab_size", info.vocab_size)?;
    facts.set_item("max_positions", info.max_positions)?;
    facts.set_item("type_vocab_size", info.type_vocab_size)?;
    facts.set_item("labels", &info.labels)?;
    facts.set_item("num_labels", info.labels.as_ref().map(Vec::len))?;
    facts.set_item("problem_type", &info.problem_type)?;
    facts.set_item("dtype", "float32")?;
    facts.set_item("device", "cpu")?;
    facts.set_item("pooling", pooling)?;
    facts.set_item("normalize", info.normalize)?;
    facts.set_item("include_prompt", info.include_prompt)?;
    facts.set_item("embedding_dim", info.embedding_dim)?;
    facts.set_item("transformer_path", &info.transformer_path)?;
    facts.set_item("weight_bytes", info.weight_bytes)?;
    facts.set_item("parameters", info.parameters)?;
    Ok(facts)
}
