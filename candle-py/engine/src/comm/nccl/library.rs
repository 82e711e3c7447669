//! NCCL and the CUDA driver, opened at run time: a build with them starts where neither is, and says so when they are
//! asked for. Source: NCCL's `nccl.h` (2.18 and later), the CUDA Driver API.

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use libloading::Library as Shared;

use super::calls::{Calls, Code, Handle, UNIQUE_ID_BYTES, UniqueId};
use crate::error::{Error, Result};

const NCCL: &str = "libnccl.so.2";
const DRIVER: &str = "libcuda.so.1";

/// The layout of [`Config`] is that of this version, 2.18; later ones take it for what it is.
const CONFIG_VERSION: c_uint = 21_800;
const CONFIG_MAGIC: c_uint = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;

const FLOAT32: c_int = 7;
const SUM: c_int = 0;

const NOT_READY: c_int = 600;
/// Of a stream that does not wait for the default one.
const NON_BLOCKING: c_uint = 1;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Id([u8; UNIQUE_ID_BYTES]);

/// `ncclConfig_t`.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    /// Of a later version, in place of padding.
    traffic_class: c_int,
}

/// Declares a table of C functions, and how it is filled.
macro_rules! functions {
    ($(#[$docs:meta])* $table:ident { $($field:ident = $symbol:literal: fn($($argument:ty),*) -> $result:ty;)* }) => {
        $(#[$docs])*
        #[derive(Debug)]
        struct $table {
            $($field: unsafe extern "C" fn($($argument),*) -> $result,)*
            /// Keeps the functions where they are.
            _shared: Shared,
        }

        impl $table {
            /// # Safety
            /// The library is what its name says: its functions have the types that are declared here.
            unsafe fn of(shared: Shared) -> Result<Self, libloading::Error> {
                Ok(Self {
                    // SAFETY: the caller vouches for the types; the library stays open as long as the table is there.
                    $($field: unsafe { *shared.get($symbol)? },)*
                    _shared: shared,
                })
            }
        }
    };
}

functions! {
    /// Of NCCL.
    NcclTable {
        get_version = c"ncclGetVersion": fn(*mut c_int) -> c_int;
        get_unique_id = c"ncclGetUniqueId": fn(*mut Id) -> c_int;
        init_rank = c"ncclCommInitRankConfig": fn(*mut *mut c_void, c_int, Id, c_int, *mut Config) -> c_int;
        async_error = c"ncclCommGetAsyncError": fn(*mut c_void, *mut c_int) -> c_int;
        all_reduce = c"ncclAllReduce":
            fn(*const c_void, *mut c_void, usize, c_int, c_int, *mut c_void, *mut c_void) -> c_int;
        all_gather = c"ncclAllGather": fn(*const c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void) -> c_int;
        finalize = c"ncclCommFinalize": fn(*mut c_void) -> c_int;
        destroy = c"ncclCommDestroy": fn(*mut c_void) -> c_int;
        abort = c"ncclCommAbort": fn(*mut c_void) -> c_int;
        last_error = c"ncclGetLastError": fn(*mut c_void) -> *const c_char;
    }
}

functions! {
    /// Of the driver.
    DriverTable {
        init = c"cuInit": fn(c_uint) -> c_int;
        count = c"cuDeviceGetCount": fn(*mut c_int) -> c_int;
        device = c"cuDeviceGet": fn(*mut c_int, c_int) -> c_int;
        retain = c"cuDevicePrimaryCtxRetain": fn(*mut *mut c_void, c_int) -> c_int;
        set_current = c"cuCtxSetCurrent": fn(*mut c_void) -> c_int;
        create_stream = c"cuStreamCreate": fn(*mut *mut c_void, c_uint) -> c_int;
        query_stream = c"cuStreamQuery": fn(*mut c_void) -> c_int;
        synchronize_stream = c"cuStreamSynchronize": fn(*mut c_void) -> c_int;
        allocate = c"cuMemAlloc_v2": fn(*mut u64, usize) -> c_int;
        free = c"cuMemFree_v2": fn(u64) -> c_int;
        write = c"cuMemcpyHtoDAsync_v2": fn(u64, *const c_void, usize, *mut c_void) -> c_int;
        read = c"cuMemcpyDtoHAsync_v2": fn(*mut c_void, u64, usize, *mut c_void) -> c_int;
        error_name = c"cuGetErrorName": fn(c_int, *mut *const c_char) -> c_int;
    }
}

/// NCCL and one device of this process. Context and stream live as long as the process.
#[derive(Debug)]
pub(super) struct Library {
    nccl: NcclTable,
    driver: DriverTable,
    context: usize,
    stream: u64,
}

impl Library {
    /// Opens NCCL and the driver, and takes a device's primary context, which Candle uses, too.
    pub(super) fn open(device: usize) -> Result<Self> {
        let nccl = open_nccl()?;
        let driver = open_driver()?;
        let (mut count, mut handle, mut context, mut stream) = (0, 0, null_mut(), null_mut());
        // SAFETY: the driver's functions as declared by it; all pointers are to locals of the right types.
        unsafe {
            driver.check("no device", (driver.init)(0)).map_err(no_device)?;
            driver.check("no device", (driver.count)(&raw mut count)).map_err(no_device)?;
            let ordinal = c_int::try_from(device).ok().filter(|ordinal| *ordinal < count);
            let Some(ordinal) = ordinal else {
                return Err(Error::device(format!("device is not among the {count} of this process: `cuda:{device}`"))
                    .with_hint("a process sees those that CUDA_VISIBLE_DEVICES names, and counts them from 0"));
            };
            driver.check("no device", (driver.device)(&raw mut handle, ordinal)).map_err(no_device)?;
            driver.check("no context", (driver.retain)(&raw mut context, handle)).map_err(no_device)?;
            driver.check("no context", (driver.set_current)(context)).map_err(no_device)?;
            driver.check("no stream", (driver.create_stream)(&raw mut stream, NON_BLOCKING)).map_err(no_device)?;
        }
        Ok(Self { nccl, driver, context: context as usize, stream: stream as u64 })
    }
}

/// A new group's id.
pub(super) fn unique_id() -> Result<UniqueId> {
    let nccl = open_nccl()?;
    nccl.unique_id()
        .map_err(|code| Error::device(format!("NCCL makes no id ({}): `{}`", nccl.said(null_mut()), code.name())))
}

fn open_nccl() -> Result<NcclTable> {
    let missing = |error: libloading::Error| {
        Error::device(format!("NCCL cannot be loaded ({}): `{NCCL}`", reason(&error)))
            .with_hint("install nvidia-nccl-cu13 or nvidia-nccl-cu12, or the system's libnccl2")
    };
    // SAFETY: to load NCCL has no effect that anything here relies on; its functions are declared as in its header.
    let nccl = unsafe { Shared::new(NCCL).and_then(|shared| NcclTable::of(shared)) }.map_err(missing)?;
    let mut version = 0;
    // SAFETY: the pointer is to a local.
    let code = Code(unsafe { (nccl.get_version)(&raw mut version) });
    if code != Code::SUCCESS || version < CONFIG_VERSION as c_int {
        return Err(Error::device(format!("NCCL is older than 2.18: `{version}`"))
            .with_hint("install a newer nvidia-nccl-cu13 or nvidia-nccl-cu12"));
    }
    Ok(nccl)
}

fn open_driver() -> Result<DriverTable> {
    // SAFETY: to load the driver has no effect that anything here relies on; its functions are declared as it does.
    unsafe { Shared::new(DRIVER).and_then(|shared| DriverTable::of(shared)) }.map_err(|error| {
        Error::device(format!("NVIDIA driver cannot be loaded ({}): `{DRIVER}`", reason(&error)))
            .with_hint("install the NVIDIA driver, or start the container with its devices and libraries")
    })
}

/// What the dynamic linker says.
fn reason(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

fn no_device(reason: String) -> Error {
    Error::device(reason).with_hint("look at nvidia-smi; in a container, start it with its devices")
}

impl NcclTable {
    fn unique_id(&self) -> Result<UniqueId, Code> {
        let mut id = Id([0; UNIQUE_ID_BYTES]);
        // SAFETY: the pointer is to a local of the right size.
        match Code(unsafe { (self.get_unique_id)(&raw mut id) }) {
            Code::SUCCESS => Ok(id.0),
            code => Err(code),
        }
    }

    fn said(&self, comm: *mut c_void) -> String {
        // SAFETY: `comm` is NCCL's or null; what comes is null or a string that lives until the next call of this thread.
        let text = unsafe { (self.last_error)(comm) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: not null, see above.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().trim().to_owned()
    }
}

impl DriverTable {
    fn check(&self, what: &str, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: the pointer is to a local; the string that comes is the driver's own, for ever.
        let known = unsafe { (self.error_name)(code, &raw mut name) == 0 && !name.is_null() };
        // SAFETY: as above.
        let name = if known { unsafe { CStr::from_ptr(name) }.to_string_lossy() } else { "error".into() };
        Err(format!("{what}: `{name} ({code})`"))
    }
}

fn raw(comm: Handle) -> *mut c_void {
    comm.0 as *mut c_void
}

impl Calls for Library {
    fn unique_id(&self) -> Result<UniqueId, Code> {
        self.nccl.unique_id()
    }

    fn init(&self, world: usize, id: &UniqueId, rank: usize) -> (Option<Handle>, Code) {
        let (Ok(world), Ok(rank)) = (c_int::try_from(world), c_int::try_from(rank)) else { return (None, Code(4)) };
        let mut config = Config {
            size: size_of::<Config>(),
            magic: CONFIG_MAGIC,
            version: CONFIG_VERSION,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
            traffic_class: UNDEFINED,
        };
        let mut comm = null_mut();
        // SAFETY: the pointers are to locals; NCCL copies the configuration before it returns.
        let code = unsafe { (self.nccl.init_rank)(&raw mut comm, world, Id(*id), rank, &raw mut config) };
        ((!comm.is_null()).then_some(Handle(comm as usize)), Code(code))
    }

    fn state(&self, comm: Handle) -> Code {
        let mut state = 0;
        // SAFETY: a handle of `init` that was not let go of; the pointer is to a local.
        match Code(unsafe { (self.nccl.async_error)(raw(comm), &raw mut state) }) {
            Code::SUCCESS => Code(state),
            code => code,
        }
    }

    fn all_reduce_sum(&self, comm: Handle, values: u64, count: usize, stream: u64) -> Code {
        let (values, stream) = (values as *mut c_void, stream as *mut c_void);
        // SAFETY: a handle as above; the caller vouches for memory and stream.
        Code(unsafe { (self.nccl.all_reduce)(values, values, count, FLOAT32, SUM, raw(comm), stream) })
    }

    fn all_gather(&self, comm: Handle, own: u64, all: u64, count: usize, stream: u64) -> Code {
        let (own, all, stream) = (own as *const c_void, all as *mut c_void, stream as *mut c_void);
        // SAFETY: a handle as above; the caller vouches for memory and stream.
        Code(unsafe { (self.nccl.all_gather)(own, all, count, FLOAT32, raw(comm), stream) })
    }

    fn finalize(&self, comm: Handle) -> Code {
        // SAFETY: a handle as above.
        Code(unsafe { (self.nccl.finalize)(raw(comm)) })
    }

    fn destroy(&self, comm: Handle) -> Code {
        // SAFETY: a handle as above, used for the last time.
        Code(unsafe { (self.nccl.destroy)(raw(comm)) })
    }

    fn abort(&self, comm: Handle) -> Code {
        // SAFETY: a handle as above, used for the last time.
        Code(unsafe { (self.nccl.abort)(raw(comm)) })
    }

    fn last_error(&self, comm: Option<Handle>) -> String {
        self.nccl.said(comm.map_or_else(null_mut, raw))
    }

    fn enter(&self) -> Result<(), String> {
        // SAFETY: the context is retained and never released.
        self.driver.check("no context", unsafe { (self.driver.set_current)(self.context as *mut c_void) })
    }

    fn stream(&self) -> u64 {
        self.stream
    }

    fn is_idle(&self, stream: u64) -> Result<bool, String> {
        // SAFETY: the stream is ours or one that the caller vouches for.
        match unsafe { (self.driver.query_stream)(stream as *mut c_void) } {
            NOT_READY => Ok(false),
            code => self.driver.check("device failed", code).map(|()| true),
        }
    }

    fn allocate(&self, size_bytes: usize) -> Result<u64, String> {
        let mut address = 0;
        // SAFETY: the pointer is to a local.
        let code = unsafe { (self.driver.allocate)(&raw mut address, size_bytes) };
        self.driver.check(&format!("no device memory for {size_bytes} bytes"), code).map(|()| address)
    }

    fn free(&self, address: u64) {
        // SAFETY: an address of `allocate`, given back once. What is wrong with the device is told by the next call.
        unsafe { (self.driver.free)(address) };
    }

    fn write(&self, address: u64, values: &[f32]) -> Result<(), String> {
        // SAFETY: the caller allocated so much at `address`; the driver has read pageable memory when it returns.
        let code = unsafe {
            (self.driver.write)(address, values.as_ptr().cast(), size_of_val(values), self.stream as *mut c_void)
        };
        self.driver.check("copy to the device failed", code)
    }

    fn read(&self, address: u64, values: &mut [f32]) -> Result<(), String> {
        let (size_bytes, stream) = (size_of_val(values), self.stream as *mut c_void);
        // SAFETY: the caller allocated so much at `address`; `values` outlives the wait for the stream.
        let code = unsafe { (self.driver.read)(values.as_mut_ptr().cast(), address, size_bytes, stream) };
        self.driver.check("copy from the device failed", code)?;
        // SAFETY: the stream is ours.
        self.driver.check("copy from the device failed", unsafe { (self.driver.synchronize_stream)(stream) })
    }
}
