//! `TcpCommunicator`: a rank of a group that a model is split over, handed to `Engine.load`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use candle_engine::Error;
use candle_engine::comm::{Communicator, Tcp};
use pyo3::prelude::*;

use crate::error::{detached, to_python};
use crate::inputs::natural;

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
        rank: i64,
        world: i64,
        addresses: Vec<String>,
        token: &str,
        timeout_s: f64,
    ) -> PyResult<Self> {
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

/// The communicator that an engine is given.
///
/// # Errors
/// `InputError` for anything else, and for one that an engine has already.
pub fn taken(value: &Bound<'_, PyAny>) -> PyResult<Arc<dyn Communicator>> {
    let result = match value.cast::<TcpCommunicator>() {
        Ok(communicator) => communicator.get().take(),
        Err(_) => {
            let found = value.get_type().name().map_or_else(|_| "object".to_owned(), |name| name.to_string());
            Err(Error::input(format!("communicator must be a TcpCommunicator: `{found}`"))
                .with_hint("leave it None for the whole model"))
        }
    };
    result.map_err(|error| to_python(value.py(), &error))
}

impl TcpCommunicator {
    /// The communicator, for the one engine that may use it.
    fn take(&self) -> Result<Arc<dyn Communicator>, Error> {
        if self.is_taken.swap(true, Ordering::SeqCst) {
            return Err(Error::input("communicator belongs to another engine: `communicator`")
                .with_hint("make one for every engine"));
        }
        let tcp: Arc<dyn Communicator> = Arc::<Tcp>::clone(&self.tcp);
        Ok(tcp)
    }
}
