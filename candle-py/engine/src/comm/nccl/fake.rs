//! A scripted NCCL and device for the tests: ranks are threads, device memory is a map, and what goes wrong is told before.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};

use super::calls::{Calls, Code, Handle, UNIQUE_ID_BYTES, UniqueId};
use crate::error::Result;

const ID: UniqueId = [7; UNIQUE_ID_BYTES];
pub(super) const STREAM: u64 = 99;
/// Operations by which a group that has joined proves itself.
const FIRST_STEPS: usize = 2;
const REMOTE_ERROR: Code = Code(6);

/// What the devices of a group have between them.
#[derive(Debug, Default)]
pub(super) struct Fabric {
    /// By operation: what every rank has brought.
    brought: Mutex<Vec<BTreeMap<usize, Vec<f32>>>>,
}

/// What goes wrong on a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Fault {
    #[default]
    None,
    /// NCCL does not get started.
    NeverStarts,
    /// NCCL refuses to start.
    RefusesToStart,
    /// Brings nothing to operations after the first ones.
    Silent,
    /// The communicator has an error once operations after the first ones wait.
    Broken,
    /// Brings what is not its own.
    Wrong,
    /// An abort does not come back.
    HangingAbort,
    /// The end of the communicator does not come.
    NeverEnds,
    /// No device memory is left.
    NoMemory,
}

/// How often a rank's communicator was let go of, and how.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) finalized: AtomicUsize,
    pub(super) destroyed: AtomicUsize,
    pub(super) aborted: AtomicUsize,
    pub(super) allocated: AtomicUsize,
    pub(super) freed: AtomicUsize,
}

#[derive(Debug)]
pub(super) struct Fake {
    fabric: Arc<Fabric>,
    rank: usize,
    world: usize,
    fault: Fault,
    pub(super) counts: Arc<Counts>,
    inner: Mutex<Inner>,
    /// An abort that hangs waits for this to be dropped.
    pub(super) hang: Mutex<Option<Receiver<()>>>,
}

#[derive(Debug, Default)]
struct Inner {
    memory: BTreeMap<u64, Vec<f32>>,
    /// Operations so far, and what is to be done once all ranks have brought theirs.
    step: usize,
    waiting: Option<Waiting>,
    polls: usize,
}

#[derive(Clone, Copy, Debug)]
enum Waiting {
    Sum { values: u64, count: usize },
    Gathering { all: u64 },
}

impl Fake {
    pub(super) fn new(fabric: &Arc<Fabric>, rank: usize, world: usize, fault: Fault) -> Self {
        let fabric = Arc::clone(fabric);
        Self { fabric, rank, world, fault, counts: Arc::default(), inner: Mutex::default(), hang: Mutex::default() }
    }

    fn bring(&self, values: Vec<f32>, waiting: Waiting) -> Code {
        let mut inner = self.inner.lock().unwrap();
        let mut brought = self.fabric.brought.lock().unwrap();
        let step = inner.step;
        if brought.len() <= step {
            brought.resize_with(step + 1, BTreeMap::new);
        }
        if self.fault != Fault::Silent || step < FIRST_STEPS {
            let wrong = |values: Vec<f32>| values.iter().map(|value| value + 1.0).collect();
            brought[step].insert(self.rank, if self.fault == Fault::Wrong { wrong(values) } else { values });
        }
        inner.step += 1;
        inner.waiting = Some(waiting);
        Code::IN_PROGRESS
    }
}

/// Memory of a device is found by address, also in the middle.
fn slice(memory: &mut BTreeMap<u64, Vec<f32>>, address: u64, count: usize) -> &mut [f32] {
    let (start, values) = memory.range_mut(..=address).next_back().unwrap();
    let offset = (address - start) as usize / size_of::<f32>();
    &mut values[offset..offset + count]
}

impl Calls for Fake {
    fn unique_id(&self) -> Result<UniqueId, Code> {
        Ok(ID)
    }

    fn init(&self, world: usize, id: &UniqueId, rank: usize) -> (Option<Handle>, Code) {
        assert_eq!((world, *id, rank), (self.world, ID, self.rank));
        match self.fault {
            Fault::RefusesToStart => (None, Code(5)),
            _ => (Some(Handle(1)), Code::IN_PROGRESS),
        }
    }

    fn state(&self, _comm: Handle) -> Code {
        assert_eq!(self.counts.aborted.load(Ordering::SeqCst) + self.counts.destroyed.load(Ordering::SeqCst), 0);
        let mut inner = self.inner.lock().unwrap();
        inner.polls += 1;
        let is_ending = self.counts.finalized.load(Ordering::SeqCst) > 0;
        match self.fault {
            Fault::NeverStarts => Code::IN_PROGRESS,
            Fault::NeverEnds if is_ending => Code::IN_PROGRESS,
            Fault::Broken if inner.step > FIRST_STEPS => REMOTE_ERROR,
            _ if inner.polls.is_multiple_of(3) => Code::SUCCESS,
            _ => Code::IN_PROGRESS,
        }
    }

    fn all_reduce_sum(&self, _comm: Handle, values: u64, count: usize, stream: u64) -> Code {
        assert_eq!(stream, STREAM);
        let own = slice(&mut self.inner.lock().unwrap().memory, values, count).to_vec();
        self.bring(own, Waiting::Sum { values, count })
    }

    fn all_gather(&self, _comm: Handle, own: u64, all: u64, count: usize, stream: u64) -> Code {
        assert_eq!(stream, STREAM);
        let own = slice(&mut self.inner.lock().unwrap().memory, own, count).to_vec();
        self.bring(own, Waiting::Gathering { all })
    }

    fn finalize(&self, _comm: Handle) -> Code {
        self.counts.finalized.fetch_add(1, Ordering::SeqCst);
        Code::IN_PROGRESS
    }

    fn destroy(&self, _comm: Handle) -> Code {
        self.counts.destroyed.fetch_add(1, Ordering::SeqCst);
        Code::SUCCESS
    }

    fn abort(&self, _comm: Handle) -> Code {
        self.counts.aborted.fetch_add(1, Ordering::SeqCst);
        if let Some(hang) = self.hang.lock().unwrap().take() {
            let _ = hang.recv();
        }
        Code::SUCCESS
    }

    fn last_error(&self, _comm: Option<Handle>) -> String {
        "said by the library".to_owned()
    }

    fn enter(&self) -> Result<(), String> {
        Ok(())
    }

    fn stream(&self) -> u64 {
        STREAM
    }

    fn is_idle(&self, _stream: u64) -> Result<bool, String> {
        let mut inner = self.inner.lock().unwrap();
        let Some(waiting) = inner.waiting else { return Ok(true) };
        let brought = self.fabric.brought.lock().unwrap();
        let parts = &brought[inner.step - 1];
        if parts.len() < self.world {
            return Ok(false);
        }
        match waiting {
            Waiting::Sum { values, count } => {
                let target = slice(&mut inner.memory, values, count);
                target.fill(0.0);
                parts.values().for_each(|part| target.iter_mut().zip(part).for_each(|(sum, value)| *sum += value));
            }
            Waiting::Gathering { all } => {
                let joined: Vec<f32> = parts.values().flatten().copied().collect();
                slice(&mut inner.memory, all, joined.len()).copy_from_slice(&joined);
            }
        }
        inner.waiting = None;
        Ok(true)
    }

    fn allocate(&self, size_bytes: usize) -> Result<u64, String> {
        if self.fault == Fault::NoMemory {
            return Err(format!("no device memory for {size_bytes} bytes: `CUDA_ERROR_OUT_OF_MEMORY (2)`"));
        }
        let mut inner = self.inner.lock().unwrap();
        let address = 1 << 40 | (self.counts.allocated.fetch_add(1, Ordering::SeqCst) as u64) << 32;
        inner.memory.insert(address, vec![f32::NAN; size_bytes / size_of::<f32>()]);
        Ok(address)
    }

    fn free(&self, address: u64) {
        self.inner.lock().unwrap().memory.remove(&address).unwrap();
        self.counts.freed.fetch_add(1, Ordering::SeqCst);
    }

    fn write(&self, address: u64, values: &[f32]) -> Result<(), String> {
        slice(&mut self.inner.lock().unwrap().memory, address, values.len()).copy_from_slice(values);
        Ok(())
    }

    fn read(&self, address: u64, values: &mut [f32]) -> Result<(), String> {
        values.copy_from_slice(slice(&mut self.inner.lock().unwrap().memory, address, values.len()));
        Ok(())
    }
}
