//! Results for Python: rows of float32 that NumPy and Arrow read where they lie.

use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::Arc;

use candle_engine::Output;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyMemoryView};

use crate::arrow;

/// Rows of float32, `(rows, width)`, read-only. `numpy.asarray(array)` and `pyarrow.array(array)` share its memory.
#[pyclass(frozen, module = "candle_py")]
pub struct Array {
    data: Arc<Vec<f32>>,
    shape: [isize; 2],
    strides: [isize; 2],
    bad_rows: Vec<usize>,
}

impl From<Output> for Array {
    fn from(output: Output) -> Self {
        const ITEM_SIZE: isize = size_of::<f32>() as isize;
        let (rows, width) = (output.rows() as isize, output.width as isize);
        Self {
            data: Arc::new(output.data),
            shape: [rows, width],
            strides: [width * ITEM_SIZE, ITEM_SIZE],
            bad_rows: output.bad_rows,
        }
    }
}

#[pymethods]
impl Array {
    /// (rows, width).
    #[getter]
    fn shape(&self) -> (isize, isize) {
        (self.shape[0], self.shape[1])
    }

    /// "float32".
    #[getter]
    fn dtype(&self) -> &'static str {
        "float32"
    }

    /// Indexes of rows that hold NaN or infinity, or that could not be normalised because they are zero.
    #[getter]
    fn bad_rows(&self) -> Vec<usize> {
        self.bad_rows.clone()
    }

    fn __len__(&self) -> usize {
        self.shape[0].unsigned_abs()
    }

    fn __repr__(&self) -> String {
        format!("Array(shape=({}, {}), dtype=float32)", self.shape[0], self.shape[1])
    }

    /// NumPy's array interface, version 3.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", if cfg!(target_endian = "little") { "<f4" } else { ">f4" })?;
        interface.set_item("shape", self.shape())?;
        interface.set_item("data", (self.data.as_ptr().addr(), true))?;
        Ok(interface)
    }

    /// The Arrow type: a fixed_size_list of float32 as a PyCapsule.
    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        PyCapsule::new_with_value(py, arrow::list_schema(self.shape[1]), arrow::SCHEMA_CAPSULE)
    }

    /// The Arrow array, type and data as PyCapsules; a requested type is not followed, as the protocol allows.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyCapsule>, Bound<'py, PyCapsule>)> {
        let _ = requested_schema;
        let array = arrow::list_array(Arc::clone(&self.data), self.shape[0]);
        Ok((self.__arrow_c_schema__(py)?, PyCapsule::new_with_value(py, array, arrow::ARRAY_CAPSULE)?))
    }

    /// PEP 688's method for the buffer, which Python has by itself from 3.12 on.
    #[pyo3(signature = (flags, /))]
    fn __buffer__<'py>(slf: &Bound<'py, Self>, flags: c_int) -> PyResult<Bound<'py, PyMemoryView>> {
        if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            return Err(PyBufferError::new_err("array is read-only"));
        }
        PyMemoryView::from(slf.as_any())
    }

    /// # Safety
    /// Called by the interpreter alone, with a `view` to fill.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("view is null"));
        }
        if flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            return Err(PyBufferError::new_err("array is read-only"));
        }
        let array = slf.get();
        let asked = |flag: c_int| flags & flag == flag;
        let dimensions = asked(ffi::PyBUF_ND);
        // SAFETY: `view` points to a buffer to fill, as the protocol says. Every pointer put into it points into
        // `array`, which is frozen and which `obj` keeps alive until the view is released; the consumer may not write
        // through it.
        unsafe {
            (*view).buf = array.data.as_ptr().cast::<c_void>().cast_mut();
            (*view).len = (array.data.len() * size_of::<f32>()) as isize;
            (*view).itemsize = size_of::<f32>() as isize;
            (*view).readonly = 1;
            (*view).ndim = if dimensions { 2 } else { 1 };
            (*view).format = if asked(ffi::PyBUF_FORMAT) { c"f".as_ptr().cast_mut() } else { ptr::null_mut() };
            (*view).shape = if dimensions { array.shape.as_ptr().cast_mut() } else { ptr::null_mut() };
            (*view).strides =
                if asked(ffi::PyBUF_STRIDES) { array.strides.as_ptr().cast_mut() } else { ptr::null_mut() };
            (*view).suboffsets = ptr::null_mut();
            (*view).internal = ptr::null_mut();
            (*view).obj = slf.into_ptr();
        }
        Ok(())
    }
}
