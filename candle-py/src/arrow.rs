//! Arrow's C data interface, as far as two things need it: giving rows out as fixed_size_list<float32>, and taking
//! uint32 arrays in. Specification: <https://arrow.apache.org/docs/format/CDataInterface.html>.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// The name of a capsule that holds an [`ArrowSchema`].
pub const SCHEMA_CAPSULE: &CStr = c"arrow_schema";
/// The name of a capsule that holds an [`ArrowArray`].
pub const ARRAY_CAPSULE: &CStr = c"arrow_array";

const NULLABLE: i64 = 2;

/// A type, laid out as the specification says.
#[repr(C)]
pub struct ArrowSchema {
    format: *const c_char,
    name: *const c_char,
    metadata: *const c_char,
    flags: i64,
    n_children: i64,
    children: *mut *mut ArrowSchema,
    dictionary: *mut ArrowSchema,
    release: Option<unsafe extern "C" fn(*mut ArrowSchema)>,
    private_data: *mut c_void,
}

/// An array, laid out as the specification says.
#[repr(C)]
pub struct ArrowArray {
    length: i64,
    null_count: i64,
    offset: i64,
    n_buffers: i64,
    n_children: i64,
    buffers: *mut *const c_void,
    children: *mut *mut ArrowArray,
    dictionary: *mut ArrowArray,
    release: Option<unsafe extern "C" fn(*mut ArrowArray)>,
    private_data: *mut c_void,
}

// SAFETY: the pointers lead to data that the struct owns through `private_data` and that no one writes to.
unsafe impl Send for ArrowSchema {}
// SAFETY: as above.
unsafe impl Send for ArrowArray {}

/// What an exported schema owns.
struct SchemaOwner {
    format: CString,
    name: &'static CStr,
    child: *mut ArrowSchema,
}

/// What an exported array owns.
struct ArrayOwner {
    data: Arc<Vec<f32>>,
    buffers: [*const c_void; 2],
    child: *mut ArrowArray,
}

/// The type fixed_size_list<element: float32>[width].
pub fn list_schema(width: isize) -> ArrowSchema {
    let element = Box::new(schema(c"f".to_owned(), c"element", ptr::null_mut()));
    // Digits hold no NUL, so the format is always made.
    let format = CString::new(format!("+w:{width}")).unwrap_or_default();
    schema(format, c"", Box::into_raw(element))
}

fn schema(format: CString, name: &'static CStr, child: *mut ArrowSchema) -> ArrowSchema {
    let owner = Box::leak(Box::new(SchemaOwner { format, name, child }));
    ArrowSchema {
        format: owner.format.as_ptr(),
        name: owner.name.as_ptr(),
        metadata: ptr::null(),
        flags: NULLABLE,
        n_children: i64::from(!child.is_null()),
        children: if child.is_null() { ptr::null_mut() } else { &raw mut owner.child },
        dictionary: ptr::null_mut(),
        release: Some(release_schema),
        private_data: ptr::from_mut(owner).cast(),
    }
}

/// `rows` lists over `data`, which is shared, not copied.
pub fn list_array(data: Arc<Vec<f32>>, rows: isize) -> ArrowArray {
    let length = data.len() as i64;
    let values = data.as_ptr().cast();
    let element = Box::new(array(Arc::clone(&data), length, 2, values, ptr::null_mut()));
    array(data, rows as i64, 1, ptr::null(), Box::into_raw(element))
}

fn array(
    data: Arc<Vec<f32>>,
    length: i64,
    n_buffers: i64,
    values: *const c_void,
    child: *mut ArrowArray,
) -> ArrowArray {
    let owner = Box::leak(Box::new(ArrayOwner { data, buffers: [ptr::null(), values], child }));
    ArrowArray {
        length,
        null_count: 0,
        offset: 0,
        n_buffers,
        n_children: i64::from(!child.is_null()),
        buffers: owner.buffers.as_mut_ptr(),
        children: if child.is_null() { ptr::null_mut() } else { &raw mut owner.child },
        dictionary: ptr::null_mut(),
        release: Some(release_array),
        private_data: ptr::from_mut(owner).cast(),
    }
}

unsafe extern "C" fn release_schema(schema: *mut ArrowSchema) {
    // SAFETY: called once, by whoever holds the struct that `schema` made, whose `private_data` is a leaked owner and
    // whose child is a leaked box. A consumer that moved the child away left its release empty, and dropping it does
    // nothing.
    unsafe {
        let owner = Box::from_raw((*schema).private_data.cast::<SchemaOwner>());
        if !owner.child.is_null() {
            drop(Box::from_raw(owner.child));
        }
        (*schema).release = None;
    }
}

unsafe extern "C" fn release_array(array: *mut ArrowArray) {
    // SAFETY: as for `release_schema`, with the struct that `array` made.
    unsafe {
        let owner = Box::from_raw((*array).private_data.cast::<ArrayOwner>());
        if !owner.child.is_null() {
            drop(Box::from_raw(owner.child));
        }
        drop(owner.data);
        (*array).release = None;
    }
}

impl Drop for ArrowSchema {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: a struct that still has its release is still owned here, and is released once.
            unsafe { release(self) }
        }
    }
}

impl Drop for ArrowArray {
    fn drop(&mut self) {
        if let Some(release) = self.release {
            // SAFETY: a struct that still has its release is still owned here, and is released once.
            unsafe { release(self) }
        }
    }
}

/// Copies the numbers of an Arrow array of uint32; `None` when `value` is no Arrow array, `Some(Err)` with what was
/// found instead of uint32 without nulls.
pub fn read_uint32(value: &Bound<'_, PyAny>) -> Option<Result<Vec<u32>, String>> {
    let exported = value.call_method0("__arrow_c_array__").ok()?;
    let (schema, array): (Bound<'_, PyCapsule>, Bound<'_, PyCapsule>) = exported.extract().ok()?;
    let schema = schema.pointer_checked(Some(SCHEMA_CAPSULE)).ok()?.cast::<ArrowSchema>();
    let array = array.pointer_checked(Some(ARRAY_CAPSULE)).ok()?.cast::<ArrowArray>();
    // SAFETY: capsules of these names hold these structs, whose producer filled them as the specification says; both
    // capsules live until this function returns, and are only read from.
    unsafe {
        let (schema, array) = (schema.as_ref(), array.as_ref());
        if schema.release.is_none() || array.release.is_none() {
            return Some(Err("a released array".to_owned()));
        }
        let format = CStr::from_ptr(schema.format).to_string_lossy();
        if format != "I" || !schema.dictionary.is_null() {
            return Some(Err(format!("Arrow format {format}")));
        }
        let (validity, values) = (*array.buffers, (*array.buffers.add(1)).cast::<u32>());
        if array.null_count != 0 && !validity.is_null() {
            return Some(Err("nulls".to_owned()));
        }
        if array.length == 0 {
            return Some(Ok(Vec::new()));
        }
        let first = values.add(array.offset as usize);
        Some(Ok(std::slice::from_raw_parts(first, array.length as usize).to_vec()))
    }
}
