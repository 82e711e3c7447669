//! Arguments from Python: token ids and offsets from any buffer or Arrow array of uint32, whole numbers, paths.
//!
//! Ids are copied, four bytes a token: the forward runs without the GIL, and what another thread might still write to
//! could not be trusted to stay in range once checked.

use candle_engine::Error;
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::prelude::*;

use crate::arrow;
use crate::error::to_python;

/// The numbers of a one-dimensional uint32 buffer or Arrow array.
///
/// # Errors
/// `InputError` for anything else; other integer types are refused rather than converted, so that a negative or a
/// too-large id cannot turn into another token unseen.
pub fn numbers(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let py = value.py();
    let refuse = |what: &str, found: String| {
        let error = Error::input(format!("{name} {what}: `{found}`"))
            .with_hint(format!("give {name} as a one-dimensional uint32 array: numpy.asarray({name}, numpy.uint32)"));
        to_python(py, &error)
    };
    let Ok(buffer) = PyUntypedBuffer::get(value) else {
        return match arrow::read_uint32(value) {
            Some(numbers) => numbers.map_err(|found| refuse("must be uint32 without nulls", found)),
            None => Err(refuse("must be a buffer or an Arrow array", type_name(value))),
        };
    };
    if buffer.dimensions() != 1 {
        return Err(refuse("must have one dimension", format!("{:?}", buffer.shape())));
    }
    match buffer.as_typed::<u32>() {
        Ok(numbers) if has_native_order(&buffer) => numbers.to_vec(py),
        _ => Err(refuse("must be uint32", element_name(&buffer))),
    }
}

/// Optional numbers, see [`numbers`].
pub fn optional_numbers(name: &str, value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Vec<u32>>> {
    value.map(|value| numbers(name, value)).transpose()
}

/// A whole number that is not negative.
pub fn natural(py: Python<'_>, name: &str, value: i64) -> PyResult<usize> {
    usize::try_from(value).map_err(|_| to_python(py, &Error::input(format!("{name} must not be negative: `{value}`"))))
}

fn type_name(value: &Bound<'_, PyAny>) -> String {
    value.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string())
}

/// Whether the bytes of a number lie as this machine reads them, which a typed buffer does not look at.
fn has_native_order(buffer: &PyUntypedBuffer) -> bool {
    match buffer.format().to_bytes().first() {
        Some(b'<') => cfg!(target_endian = "little"),
        Some(b'>' | b'!') => cfg!(target_endian = "big"),
        _ => true,
    }
}

/// The element type as NumPy calls it.
fn element_name(buffer: &PyUntypedBuffer) -> String {
    match ElementType::from_format(buffer.format()) {
        ElementType::SignedInteger { bytes } => format!("int{}", bytes * 8),
        ElementType::UnsignedInteger { bytes: 4 } => "uint32 of another byte order or alignment".to_owned(),
        ElementType::UnsignedInteger { bytes } => format!("uint{}", bytes * 8),
        ElementType::Float { bytes } => format!("float{}", bytes * 8),
        ElementType::Bool => "bool".to_owned(),
        ElementType::Unknown => buffer.format().to_string_lossy().into_owned(),
    }
}
