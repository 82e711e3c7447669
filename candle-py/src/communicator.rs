//! `TcpCommunicator` and `NcclCommunicator`: a rank of a group that a model is split over, handed to `Engine.load`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_engine::Error;
use candle_engine::comm::{Communicator, Tcp};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{detached, to_python};
use crate::inputs::{Given, natural};

/// A rank of a group of processes over TCP.
#[pyclass(frozen, module = "candle_py")]
pub struct TcpCommunicator {
    tcp: Arc<Tcp>,
    is_taken: AtomicBool,
}

#[pymethods]
impl TcpCommunicator {
    /// Connects to the other ranks.
    #[new]
    #[pyo3(signature = (rank, world, addresses, token, timeout_s))]
    fn new(
        py: Python<'_>,
        rank: Given<i64>,
        world: Given<i64>,
        addresses: Vec<String>,
        token: &str,
        timeout_s: Given<f64>,
    ) -> PyResult<Self> {
        let timeout_s = timeout_s.named(py, "timeout_s")?;
        let timeout = Duration::try_from_secs_f64(timeout_s).map_err(|_| {
            to_python(py, &Error::input(format!("timeout_s must be a number of seconds: `{timeout_s}`")))
        })?;
        let (rank, world) = (natural(py, "rank", rank)?, natural(py, "world", world)?);
        let tcp = detached(py, || Tcp::connect(rank, world, &addresses, token, timeout))?;
        Ok(Self { tcp: Arc::new(tcp), is_taken: AtomicBool::new(false) })
    }

    /// The place of this process.
    #[getter]
    fn rank(&self) -> usize {
        self.tcp.rank()
    }

    /// How many processes there are.
    #[getter]
    fn world(&self) -> usize {
        self.tcp.world()
    }

    /// Ends the group.
    fn abort(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.tcp.abort(reason));
    }

    fn __repr__(&self) -> String {
        format!("TcpCommunicator(rank={}, world={})", self.rank(), self.world())
    }
}

/// A rank of a group of processes over NCCL, one device each.
#[pyclass(frozen, module = "candle_py")]
pub struct NcclCommunicator {
    nccl: Arc<dyn Communicator>,
    is_taken: AtomicBool,
}

#[pymethods]
impl NcclCommunicator {
    /// Joins the ranks of a group over TCP.
    #[new]
    #[pyo3(
        signature = (control, *, device=Given::Held(0), unique_id=None),
        text_signature = "(control, *, device=0, unique_id=None)"
    )]
    fn new(
        py: Python<'_>,
        control: &Bound<'_, TcpCommunicator>,
        device: Given<i64>,
        unique_id: Option<Vec<u8>>,
    ) -> PyResult<Self> {
        let device = natural(py, "device", device)?;
        let control = control.get();
        let nccl = detached(py, || joined(control, device, unique_id))?;
        Ok(Self { nccl, is_taken: AtomicBool::new(false) })
    }

    /// The place of this process.
    #[getter]
    fn rank(&self) -> usize {
        self.nccl.rank()
    }

    /// How many processes there are.
    #[getter]
    fn world(&self) -> usize {
        self.nccl.world()
    }

    /// Ends the group.
    fn abort(&self, py: Python<'_>, reason: &str) {
        py.detach(|| self.nccl.abort(reason));
    }

    fn __repr__(&self) -> String {
        format!("NcclCommunicator(rank={}, world={})", self.nccl.rank(), self.nccl.world())
    }
}

/// An id for a group over NCCL, 128 bytes.
#[pyfunction]
pub fn nccl_unique_id(py: Python<'_>) -> PyResult<Bound<'_, PyBytes>> {
    Ok(PyBytes::new(py, &detached(py, made_id)?))
}

#[cfg(feature = "nccl")]
fn joined(control: &TcpCommunicator, device: usize, id: Option<Vec<u8>>) -> Result<Arc<dyn Communicator>, Error> {
    use candle_engine::comm::{Nccl, UNIQUE_ID_BYTES};

    let wrong = |id: Vec<u8>| Error::input(format!("unique_id must have {UNIQUE_ID_BYTES} bytes: `{}`", id.len()));
    let id = id.map(|id| id.try_into().map_err(wrong)).transpose()?;
    let timeout = control.tcp.timeout();
    Ok(Arc::new(Nccl::connect(take(&control.tcp, &control.is_taken)?, device, id, timeout)?))
}

#[cfg(feature = "nccl")]
fn made_id() -> Result<Vec<u8>, Error> {
    candle_engine::comm::nccl_unique_id().map(|id| id.to_vec())
}

#[cfg(not(feature = "nccl"))]
fn joined(_control: &TcpCommunicator, _device: usize, _id: Option<Vec<u8>>) -> Result<Arc<dyn Communicator>, Error> {
    Err(without_nccl())
}

#[cfg(not(feature = "nccl"))]
fn made_id() -> Result<Vec<u8>, Error> {
    Err(without_nccl())
}

#[cfg(not(feature = "nccl"))]
fn without_nccl() -> Error {
    Error::device("this build has no NCCL: `CPU build`").with_hint("install candle-py-cuda, or use a TcpCommunicator")
}

/// The communicator that an engine is given.
///
/// # Errors
/// `InputError` for anything else, and for one that an engine has already.
pub fn taken(value: &Bound<'_, PyAny>) -> PyResult<Arc<dyn Communicator>> {
    let result = if let Ok(communicator) = value.cast::<TcpCommunicator>() {
        let TcpCommunicator { tcp, is_taken } = communicator.get();
        take(tcp, is_taken)
    } else if let Ok(communicator) = value.cast::<NcclCommunicator>() {
        let NcclCommunicator { nccl, is_taken } = communicator.get();
        if is_taken.swap(true, Ordering::SeqCst) { Err(belongs_to_another()) } else { Ok(Arc::clone(nccl)) }
    } else {
        let found = value.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
        Err(Error::input(format!("communicator must be a TcpCommunicator or NcclCommunicator: `{found}`"))
            .with_hint("leave it None for the whole model"))
    };
    result.map_err(|error| to_python(value.py(), &error))
}

/// The group over TCP, for the one engine or group over NCCL that may use it.
fn take(tcp: &Arc<Tcp>, is_taken: &AtomicBool) -> Result<Arc<dyn Communicator>, Error> {
    if is_taken.swap(true, Ordering::SeqCst) {
        return Err(belongs_to_another());
    }
    let tcp: Arc<dyn Communicator> = Arc::<Tcp>::clone(tcp);
    Ok(tcp)
}

fn belongs_to_another() -> Error {
    Error::input("communicator belongs to another engine: `communicator`").with_hint("make one for every engine")
}
