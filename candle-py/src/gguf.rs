//! A GGUF file's metadata as Python values: what a tokenizer and a chat template are made of.

use std::path::PathBuf;

use candle_engine::{Error, GgufFile, GgufValue};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::error::detached;

/// The metadata of a GGUF file.
#[pyfunction]
pub fn gguf_metadata(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    let entries = detached(py, || {
        let file = GgufFile::open(&path)?;
        let value = |key: &str| Ok(file.value(key)?.map(|value| (key.to_owned(), value)));
        file.keys().filter_map(|key| value(key).transpose()).collect::<Result<Vec<_>, Error>>()
    })?;
    let metadata = PyDict::new(py);
    for (key, value) in entries {
        metadata.set_item(key, to_object(py, value)?)?;
    }
    Ok(metadata)
}

fn to_object(py: Python<'_>, value: GgufValue) -> PyResult<Bound<'_, PyAny>> {
    match value {
        GgufValue::Unsigned(value) => value.into_bound_py_any(py),
        GgufValue::Signed(value) => value.into_bound_py_any(py),
        GgufValue::Float(value) => value.into_bound_py_any(py),
        GgufValue::Bool(value) => value.into_bound_py_any(py),
        GgufValue::Text(text) => text.into_bound_py_any(py),
        GgufValue::List(values) => {
            let list = PyList::empty(py);
            for value in values {
                list.append(to_object(py, value)?)?;
            }
            Ok(list.into_any())
        }
    }
}
