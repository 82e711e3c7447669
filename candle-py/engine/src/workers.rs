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

    /// Runs `work` on all items at the same time, each on a thread of the pool that leads an equal share of its threads: they
    /// stand ready for what it spreads (see [`team`](crate::team)).
    pub fn run_teams<T: Send>(&self, items: Vec<T>, work: impl Fn(T, &mut S) + Send + Sync) {
        let Some(pool) = &self.pool else {
            return items.into_iter().for_each(|item| self.with_buffers(|buffers| work(item, buffers)));
        };
        let threads = (pool.current_num_threads() / items.len().max(1)).max(1);
        let lead = |item: T| {
            let team = Team::new(threads);
            // Spawned by the leader, which has its thread already: leaders cannot wait for each other's.
            rayon::scope(|scope| {
                (1..threads).for_each(|_| scope.spawn(|_| team.serve()));
                team.lead(|| self.with_buffers(|buffers| work(item, buffers)));
            });
        };
        pool.scope(|scope| items.into_iter().for_each(|item| scope.spawn(|_| lead(item))));
    }

    /// Runs `work` on one item after the other inside the pool, where it may spread itself.
    pub fn run_in_order<T: Send>(&self, items: Vec<T>, work: impl Fn(T, &mut S) + Send + Sync) {
        self.run_teams(vec![items], |items, buffers| items.into_iter().for_each(|item| work(item, buffers)));
    }

    /// Runs `work` on every item inside the pool. The items are begun in their order, each by the next free thread.
    pub fn run<T: Send>(&self, items: Vec<T>, work: impl Fn(T, &mut S) + Send + Sync) {
        let queue = Mutex::new(items.into_iter());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let drain = || {
            self.with_buffers(|buffers| {
                while let Some(item) = next() {
                    work(item, buffers);
                }
            });
        };
        match &self.pool {
            Some(pool) => {
                pool.broadcast(|_| drain());
            }
            None => drain(),
        }
    }

    /// Calls `work` with buffers that nobody else has meanwhile.
    fn with_buffers(&self, work: impl FnOnce(&mut S)) {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffers = idle.unwrap_or_default();
        work(&mut buffers);
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(buffers);
    }
}

/// What first went wrong in work that several threads do.
#[derive(Debug, Default)]
pub struct Failure(Mutex<Option<Error>>);

impl Failure {
    /// Notes how a piece of the work ended.
    pub fn note(&self, result: Result<()>) {
        if let Err(error) = result {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }

    /// How all of it ended.
    ///
    /// # Errors
    /// The first that was noted.
    pub fn result(self) -> Result<()> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::team;

    #[test]
    fn teams_work_at_the_same_time_with_equal_shares_of_the_threads() {
        for (threads, teams) in [(1, 1), (1, 3), (2, 1), (2, 2), (6, 3), (7, 3), (8, 1)] {
            let workers = Workers::<Vec<usize>>::new(threads).unwrap();
            // Nobody passes before all teams have begun; each part of a team's loop waits for all its threads.
            let begun = Barrier::new(if threads > 1 { teams } else { 1 });
            let done = Mutex::new(Vec::new());
            for _ in 0..50 {
                workers.run_teams((0..teams).collect(), |item, buffers| {
                    begun.wait();
                    let share = (threads / teams).max(1);
                    assert_eq!(team::threads(), share);
                    let together = Barrier::new(share);
                    team::each(share, |_| {
                        together.wait();
                    });
                    buffers.push(item);
                    done.lock().unwrap().push(item);
                });
            }
            let mut done = done.into_inner().unwrap();
            done.sort_unstable();
            assert_eq!(done, (0..teams).flat_map(|item| [item; 50]).collect::<Vec<_>>());
            let kept: usize = workers.idle.lock().unwrap().iter().map(Vec::len).sum();
            assert_eq!(kept, 50 * teams);
        }
    }

    #[test]
    fn callers_of_one_pool_do_not_wait_for_each_others_threads() {
        let workers = Workers::<()>::new(3).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for items in (1..=3).cycle().take(300) {
                        workers.run_teams(vec![(); items], |(), ()| team::each(5, |_| std::hint::spin_loop()));
                    }
                });
            }
        });
    }

    #[test]
    fn the_first_failure_is_told() {
        let failure = Failure::default();
        failure.note(Ok(()));
        failure.note(Err(Error::input("one")));
        failure.note(Err(Error::input("two")));
        assert!(failure.result().unwrap_err().to_string().contains("one"));
        assert!(Failure::default().result().is_ok());
    }
}
