//! The engine's own threads, and the buffers that they keep from one piece of work to the next.

use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

use rayon::ThreadPool;

use crate::error::{Error, Result};
use crate::team::Team;

/// The threads that this process may use: the least of its affinity and its control group's CPU quota.
pub fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// A pool of threads, each piece of work with buffers `S` to itself.
#[derive(Debug)]
pub struct Workers<S> {
    /// `None` where one thread is enough: the caller's own.
    pool: Option<ThreadPool>,
    idle: Mutex<Vec<S>>,
}

impl<S: Default + Send> Workers<S> {
    /// A pool of `threads`.
    pub fn new(threads: usize) -> Result<Self> {
        let build = || {
            rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .thread_name(|index| format!("candle-engine-{index}"))
                .build()
                .map_err(|error| Error::device(format!("threads cannot be started: `{error}`")))
        };
        let pool = if threads > 1 { Some(build()?) } else { None };
        Ok(Self { pool, idle: Mutex::default() })
    }

    /// Runs `work` once, inside the pool, whose other threads stand ready for what it spreads (see [`team`](crate::team)).
    pub fn install<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        let Some(pool) = &self.pool else { return work() };
        let team = Team::new(pool.current_num_threads());
        // Spawned by the leader, which has its thread already: two leaders at once cannot wait for each other's.
        pool.scope(|scope| {
            (1..pool.current_num_threads()).for_each(|_| scope.spawn(|_| team.serve()));
            team.lead(work)
        })
    }

    /// Runs `work` on one item after the other inside the pool, where it may spread itself.
    pub fn run_in_order<T: Send>(&self, items: Vec<T>, work: impl Fn(T, &mut S) + Send + Sync) {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffers = idle.unwrap_or_default();
        self.install(|| items.into_iter().for_each(|item| work(item, &mut buffers)));
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(buffers);
    }

    /// Runs `work` on every item inside the pool. The items are begun in their order, each by the next free thread.
    pub fn run<T: Send>(&self, items: Vec<T>, work: impl Fn(T, &mut S) + Send + Sync) {
        let queue = Mutex::new(items.into_iter());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let drain = || {
            let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut buffers = idle.unwrap_or_default();
            while let Some(item) = next() {
                work(item, &mut buffers);
            }
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(buffers);
        };
        match &self.pool {
            Some(pool) => {
                pool.broadcast(|_| drain());
            }
            None => drain(),
        }
    }
}
