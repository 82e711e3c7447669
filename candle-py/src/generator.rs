//! `Generator` and its events: requests in, steps without the GIL, new tokens out. A constraint's Python code runs with
//! the GIL, and only where a constrained row chooses its next token.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, TryLockError};

use candle_engine::generate::{self, Finish, Limits, MaskVerdict, Masks, Params};
use candle_engine::{DecoderSession, Error};
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::{detached, to_python};
use crate::inputs::{Given, natural, numbers};
use crate::process::Home;

/// The cache where the caller names no size.
const CACHE_BYTES: usize = 1 << 30;

/// Generates tokens for many requests at a time; see `Engine.generator`.
#[pyclass(frozen, module = "candle_py")]
pub struct Generator {
    state: Mutex<State>,
    home: Home,
}

struct State {
    generator: generate::Generator<DecoderSession>,
    constraints: HashMap<u64, Py<PyAny>>,
    /// Events of a step that an interrupt kept from being told.
    untold: Vec<generate::Event>,
}

impl Generator {
    /// A generator on the engine's model; `longest` is tokens and beams of the longest request.
    pub fn new(
        py: Python<'_>,
        engine: &candle_engine::Engine,
        max_rows: Given<i64>,
        cache_bytes: Option<Given<i64>>,
        step_tokens: Given<i64>,
        longest: (Given<i64>, Given<i64>),
    ) -> PyResult<Self> {
        let cache_bytes = cache_bytes.map(|bytes| natural(py, "cache_bytes", bytes)).transpose()?;
        let limits = Limits {
            max_rows: natural(py, "max_rows", max_rows)?,
            cache_bytes: cache_bytes.unwrap_or(CACHE_BYTES),
            longest_tokens: natural(py, "longest_tokens", longest.0)?,
            beams: natural(py, "beams", longest.1)?,
            step_tokens: natural(py, "step_tokens", step_tokens)?,
            threads: engine.threads(),
            isa: engine.isa(),
        };
        let generator = detached(py, || generate::Generator::new(engine.session()?, limits))?;
        let state = State { generator, constraints: HashMap::new(), untold: Vec::new() };
        Ok(Self { state: Mutex::new(state), home: Home::of(engine) })
    }

    /// The state, which nobody waits for: a constraint that asked for it would wait for itself.
    fn lock(&self) -> Result<MutexGuard<'_, State>, Error> {
        self.home.check()?;
        self.state.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => Error::input("generator is in use by another thread or by its own constraint")
                .with_hint("call it from one thread at a time"),
            TryLockError::Poisoned(_) => Error::internal("generator failed in an earlier call")
                .with_hint("make another generator of the same engine"),
        })
    }

    fn read<T>(&self, py: Python<'_>, of: impl FnOnce(&State) -> T) -> PyResult<T> {
        let state = self.lock().map_err(|error| to_python(py, &error))?;
        Ok(of(&state))
    }
}

#[pymethods]
impl Generator {
    /// Takes a request.
    #[pyo3(signature = (
        request_id, ids, *, max_new_tokens, temperature=Given::Held(0.0), top_k=None, top_p=Given::Held(1.0),
        min_p=Given::Held(0.0), repetition_penalty=Given::Held(1.0), seed=None, stop_ids=Vec::new(),
        beams=Given::Held(1), length_penalty=Given::Held(1.0), min_new_tokens=Given::Held(0), constraint=None
    ), text_signature = "($self, request_id, ids, *, max_new_tokens, temperature=0.0, top_k=None, top_p=1.0, \
        min_p=0.0, repetition_penalty=1.0, seed=0, stop_ids=(), beams=1, length_penalty=1.0, min_new_tokens=0, \
        constraint=None)")]
    #[allow(clippy::too_many_arguments)]
    fn add(
        &self,
        py: Python<'_>,
        request_id: &Bound<'_, PyAny>,
        ids: &Bound<'_, PyAny>,
        max_new_tokens: Given<i64>,
        temperature: Given<f32>,
        top_k: Option<Given<i64>>,
        top_p: Given<f32>,
        min_p: Given<f32>,
        repetition_penalty: Given<f32>,
        seed: Option<&Bound<'_, PyAny>>,
        stop_ids: Vec<Given<i64>>,
        beams: Given<i64>,
        length_penalty: Given<f32>,
        min_new_tokens: Given<i64>,
        constraint: Option<Py<PyAny>>,
    ) -> PyResult<()> {
        let id = number("request_id", request_id)?;
        let stop_id = |id: Given<i64>| {
            let outside = || to_python(py, &Error::input(format!("stop id is outside the vocabulary: `{id}`")));
            id.held().and_then(|id| u32::try_from(id).ok()).ok_or_else(outside)
        };
        let params = Params {
            max_new_tokens: natural(py, "max_new_tokens", max_new_tokens)?,
            temperature: temperature.named(py, "temperature")?,
            top_k: top_k.map(|top_k| natural(py, "top_k", top_k)).transpose()?,
            top_p: top_p.named(py, "top_p")?,
            min_p: min_p.named(py, "min_p")?,
            repetition_penalty: repetition_penalty.named(py, "repetition_penalty")?,
            seed: seed.map_or(Ok(0), |seed| number("seed", seed))?,
            stop_ids: stop_ids.into_iter().map(stop_id).collect::<PyResult<_>>()?,
            beams: natural(py, "beams", beams)?,
            length_penalty: length_penalty.named(py, "length_penalty")?,
            min_new_tokens: natural(py, "min_new_tokens", min_new_tokens)?,
            constrained: constraint.is_some(),
            stream: true,
        };
        let prompt = numbers("ids", ids)?;
        let mut state = self.lock().map_err(|error| to_python(py, &error))?;
        state.generator.add(id, prompt, params).map_err(|error| to_python(py, &error))?;
        if let Some(constraint) = constraint {
            state.constraints.insert(id, constraint);
        }
        Ok(())
    }

    /// One step of the model, and what came of it.
    fn step(&self, py: Python<'_>) -> PyResult<Vec<Event>> {
        let (events, interrupt, _ended) = detached(py, || {
            let mut state = self.lock()?;
            let State { generator, constraints, untold } = &mut *state;
            let mut masks = Constraints { constraints, interrupt: None };
            untold.extend(generator.step(&mut masks)?);
            let interrupt = masks.interrupt;
            let events = if interrupt.is_none() { std::mem::take(untold) } else { Vec::new() };
            let ended = events.iter().filter(|event| event.finished.is_some());
            // They are dropped where the GIL is held.
            let ended: Vec<Py<PyAny>> = ended.filter_map(|event| constraints.remove(&event.id)).collect();
            Ok((events, interrupt, ended))
        })?;
        match interrupt {
            Some(interrupt) => Err(interrupt),
            None => Ok(events.into_iter().map(Event::from).collect()),
        }
    }

    /// Ends a request; nothing happens where it is not on its way.
    fn stop(&self, py: Python<'_>, request_id: &Bound<'_, PyAny>) -> PyResult<()> {
        let id = number("request_id", request_id)?;
        self.lock().map_err(|error| to_python(py, &error))?.generator.stop(id);
        Ok(())
    }

    /// Rows that further requests could take at once.
    #[getter]
    fn free_rows(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, |state| state.generator.free_rows())
    }

    /// Requests whose last event has not been told.
    #[getter]
    fn pending(&self, py: Python<'_>) -> PyResult<usize> {
        let ended = |state: &State| state.untold.iter().filter(|event| event.finished.is_some()).count();
        self.read(py, |state| state.generator.pending() + ended(state))
    }

    /// Counters, times and the cache's blocks.
    #[getter]
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let found = self.read(py, |state| state.generator.stats())?;
        let stats = PyDict::new(py);
        stats.set_item("steps", found.steps)?;
        stats.set_item("prefill_tokens", found.prefill_tokens)?;
        stats.set_item("decode_tokens", found.decode_tokens)?;
        stats.set_item("shared_tokens", found.shared_tokens)?;
        stats.set_item("preemptions", found.preemptions)?;
        stats.set_item("model_s", found.model_s)?;
        stats.set_item("attention_s", found.attention_s)?;
        stats.set_item("mask_s", found.mask_s)?;
        stats.set_item("sampling_s", found.sampling_s)?;
        stats.set_item("block_bytes", found.block_bytes)?;
        stats.set_item("blocks", found.blocks)?;
        stats.set_item("held_blocks", found.held_blocks)?;
        stats.set_item("kept_blocks", found.kept_blocks)?;
        Ok(stats)
    }
}

/// News of one request.
#[pyclass(frozen, module = "candle_py", get_all)]
pub struct Event {
    /// The request.
    request_id: u64,
    /// Its tokens since the last event.
    ids: Vec<u32>,
    /// Their log-probabilities.
    logprobs: Vec<f32>,
    /// Why it ended, in its last event.
    finish: Option<&'static str>,
    /// What went wrong, where it ended with an error.
    error: Option<String>,
}

impl From<generate::Event> for Event {
    fn from(event: generate::Event) -> Self {
        let (finish, error) = match event.finished {
            None => (None, None),
            Some(Finish::Stop) => (Some("stop"), None),
            Some(Finish::Length) => (Some("length"), None),
            Some(Finish::Stopped) => (Some("stopped"), None),
            Some(Finish::Error(text)) => (Some("error"), Some(text)),
        };
        Self { request_id: event.id, ids: event.new_tokens, logprobs: event.logprobs, finish, error }
    }
}

#[pymethods]
impl Event {
    fn __repr__(&self) -> String {
        let finish = self.finish.map_or("None".to_owned(), |finish| format!("'{finish}'"));
        format!("Event(request_id={}, ids={:?}, finish={finish})", self.request_id, self.ids)
    }
}

/// The requests' Python objects as masks.
struct Constraints<'a> {
    constraints: &'a HashMap<u64, Py<PyAny>>,
    /// What is no mere exception, such as a KeyboardInterrupt: the step ends with it.
    interrupt: Option<PyErr>,
}

impl Masks for Constraints<'_> {
    fn mask(&mut self, id: u64, new_tokens: &[u32]) -> Result<MaskVerdict, Error> {
        let constraint =
            self.constraints.get(&id).ok_or_else(|| Error::internal(format!("request has no constraint: `{id}`")))?;
        Python::attach(|py| {
            let answer = constraint.bind(py).call_method1("mask", (new_tokens.to_vec(),)).map_err(|error| {
                let text = format!("constraint failed: `{error}`");
                if !error.is_instance_of::<PyException>(py) {
                    self.interrupt = Some(error);
                }
                Error::input(text)
            })?;
            if answer.is_none() {
                return Ok(MaskVerdict::Stop);
            }
            let bytes = answer.cast::<PyBytes>().map_err(|_| {
                let found = answer.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
                Error::input(format!("mask must be bytes or None: `{found}`"))
            })?;
            let (words, rest) = bytes.as_bytes().as_chunks();
            if !rest.is_empty() {
                let found = bytes.as_bytes().len();
                return Err(Error::input(format!(
                    "mask must be whole uint32 numbers, not of so many bytes: `{found}`"
                )));
            }
            Ok(MaskVerdict::Allowed(words.iter().map(|word| u32::from_le_bytes(*word)).collect()))
        })
    }
}

/// A whole number of 64 bits.
fn number(name: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    value.extract().map_err(|_| {
        let error = Error::input(format!("{name} must be a whole number from 0 to 2^64 - 1: `{value}`"));
        to_python(value.py(), &error)
    })
}
