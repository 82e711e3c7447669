//! Arguments from Python: token ids and offsets from any buffer or Arrow array of uint32, whole numbers, paths.
//!
//! Ids are copied, four bytes a token: the forward runs without the GIL, and what another thread might still write to
//! could not be trusted to stay in range once checked.

use std::fmt::{self, Display, Formatter};

use candle_engine::Error;
use pyo3::buffer::{ElementType, PyUntypedBuffer};
use pyo3::exceptions::PyOverflowError;
use pyo3::prelude::*;

use crate::arrow;
use crate::error::to_python;

/// Digits of a number that a message shows.
const MOST_DIGITS: usize = 60;

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

/// A number as it was given: one that `T` holds, or the digits of one beyond it.
pub enum Given<T> {
    /// It fits.
    Held(T),
    /// It does not; long ones are cut.
    Beyond(String),
}

impl<'a, 'py, T: FromPyObject<'a, 'py>> FromPyObject<'a, 'py> for Given<T> {
    type Error = PyErr;

    fn extract(value: Borrowed<'a, 'py, PyAny>) -> PyResult<Self> {
        match value.extract::<T>().map_err(Into::into) {
            Ok(held) => Ok(Self::Held(held)),
            Err(error) if error.is_instance_of::<PyOverflowError>(value.py()) => {
                let digits = value.to_string();
                let is_long = digits.len() > MOST_DIGITS;
                Ok(Self::Beyond(if is_long { format!("{:.MOST_DIGITS$}...", digits) } else { digits }))
            }
            Err(error) => Err(error),
        }
    }
}

impl<T: Copy> Given<T> {
    /// The number, where it fits.
    pub fn held(&self) -> Option<T> {
        if let Self::Held(held) = self { Some(*held) } else { None }
    }

    /// The number.
    ///
    /// # Errors
    /// `InputError` with this name for one that does not fit.
    pub fn named(&self, py: Python<'_>, name: &str) -> PyResult<T> {
        match self {
            Self::Held(held) => Ok(*held),
            Self::Beyond(digits) => {
                Err(to_python(py, &Error::input(format!("{name} does not fit in 64 bits: `{digits}`"))))
            }
        }
    }
}

impl<T: Display> Display for Given<T> {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        match self {
            Self::Held(held) => held.fmt(formatter),
            Self::Beyond(digits) => formatter.write_str(digits),
        }
    }
}

/// A whole number that is not negative.
pub fn natural(py: Python<'_>, name: &str, value: Given<i64>) -> PyResult<usize> {
    let value = value.named(py, name)?;
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
