//! Engine errors, and panics, as the exceptions that `candle_py.errors` declares.

use candle_engine::{Error, catching_panics};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// Runs engine work with the GIL released; an engine error or a panic becomes a Python exception.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, Error> + Send) -> PyResult<T> {
    py.detach(|| catching_panics(work)).map_err(|error| to_python(py, &error))
}

/// The exception for an engine error: its class by the kind of error, its arguments message and hint.
pub fn to_python(py: Python<'_>, error: &Error) -> PyErr {
    static MODEL: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static INPUT: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static DEVICE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static COMMUNICATOR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    static INTERNAL: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let (cell, name) = match error {
        Error::Model { .. } => (&MODEL, "ModelError"),
        Error::Input { .. } => (&INPUT, "InputError"),
        Error::Device { .. } => (&DEVICE, "DeviceError"),
        Error::Communicator { .. } => (&COMMUNICATOR, "CommunicatorError"),
        Error::Internal { .. } => (&INTERNAL, "InternalError"),
    };
    let class = match cell.import(py, "candle_py.errors", name) {
        Ok(class) => class.clone(),
        Err(failure) => return failure,
    };
    let arguments = (error.to_string(), error.hint().map(str::to_owned));
    PyErr::from_type(class, arguments)
}
