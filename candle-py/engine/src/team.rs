//! Threads that stand ready while one of them runs a piece of work, and take their share of each loop in it that is spread:
//! handing out a loop costs less than waking a thread does, of which a step of generation would need hundreds.
//!
//! Results do not depend on who does which part. Knows nothing of models.

use std::any::Any;
use std::cell::Cell;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::yield_now;

/// How often a waiting thread looks before it lets others run between looks: some 20 microseconds.
const SPINS: usize = 1000;

/// Parts of a loop, by number. The pointer is valid while one of its parts is not finished.
type Work<'a> = &'a (dyn Fn(usize) + Sync);

/// What went wrong in a part.
type Panic = Box<dyn Any + Send>;

/// Some threads of a pool: one that leads, others that serve.
#[derive(Debug)]
pub struct Team {
    threads: usize,
    /// The loop's parts in the upper half, those that somebody has taken in the lower.
    claims: AtomicU64,
    /// Points to the `Work` of the loop that parts are taken of.
    work: AtomicPtr<()>,
    finished: AtomicUsize,
    is_over: AtomicBool,
    panic: Mutex<Option<Panic>>,
}

thread_local! {
    /// The team that this thread leads.
    static LED: Cell<*const Team> = const { Cell::new(ptr::null()) };
}

impl Team {
    /// A team of `threads`, its leader among them.
    pub fn new(threads: usize) -> Self {
        Self {
            threads,
            claims: AtomicU64::new(0),
            work: AtomicPtr::new(ptr::null_mut()),
            finished: AtomicUsize::new(0),
            is_over: AtomicBool::new(false),
            panic: Mutex::new(None),
        }
    }

    /// Runs `work`, whose loops the serving threads share, and dismisses them.
    pub fn lead<R>(&self, work: impl FnOnce() -> R) -> R {
        /// Dismisses also where `work` panics.
        struct Led<'a>(&'a Team, *const Team);
        impl Drop for Led<'_> {
            fn drop(&mut self) {
                LED.set(self.1);
                self.0.is_over.store(true, Ordering::Release);
            }
        }
        let _led = Led(self, LED.replace(self));
        work()
    }

    /// Takes parts of one loop after the other until the leader is through.
    pub fn serve(&self) {
        let mut spins = 0;
        while !self.is_over.load(Ordering::Acquire) {
            if self.take_part() {
                spins = 0;
            } else {
                wait(&mut spins);
            }
        }
    }

    /// Does one part, if there is one that nobody has taken.
    fn take_part(&self) -> bool {
        let claims = self.claims.load(Ordering::Acquire);
        let (parts, taken) = (claims >> 32, claims & u64::from(u32::MAX));
        if taken >= parts {
            return false;
        }
        if self.claims.compare_exchange_weak(claims, claims + 1, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return true;
        }
        let work = self.work.load(Ordering::Acquire).cast::<Work<'_>>();
        // SAFETY: this part is taken and not finished, so that `each` has not returned: `work` points to its argument.
        let work = unsafe { *work };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(taken as usize))) {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
        self.finished.fetch_add(1, Ordering::Release);
        true
    }

    /// Runs a loop of `parts` parts and returns when all are finished.
    fn each(&self, parts: u32, work: Work<'_>) {
        self.finished.store(0, Ordering::Relaxed);
        self.work.store((&raw const work).cast_mut().cast(), Ordering::Release);
        // No part of an earlier loop is left, hence nobody takes one before this is stored.
        self.claims.store(u64::from(parts) << 32, Ordering::Release);
        while self.take_part() {}
        let mut spins = 0;
        while self.finished.load(Ordering::Acquire) < parts as usize {
            wait(&mut spins);
        }
        let panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

/// Lets a moment pass.
fn wait(spins: &mut usize) {
    if *spins < SPINS {
        *spins += 1;
        spin_loop();
    } else {
        yield_now();
    }
}

/// The threads that a loop begun here would be spread over.
pub fn threads() -> usize {
    // SAFETY: set by `lead` alone, which outlives all that it runs on this thread.
    unsafe { LED.get().as_ref() }.map_or(1, |team| team.threads)
}

/// Calls `work` for `0 .. parts`, spread over the team that this thread leads; one after the other if it leads none. What
/// `work` spreads in turn is not.
pub fn each(parts: usize, work: impl Fn(usize) + Sync) {
    // SAFETY: as in `threads`.
    match (unsafe { LED.get().as_ref() }, u32::try_from(parts)) {
        (Some(team), Ok(count)) if parts > 1 => {
            /// Leads the team again also where a part panics.
            struct Led(*const Team);
            impl Drop for Led {
                fn drop(&mut self) {
                    LED.set(self.0);
                }
            }
            let _led = Led(LED.replace(ptr::null()));
            team.each(count, &work);
        }
        _ => (0..parts).for_each(work),
    }
}

/// Calls `work` on every item, spread as by [`each`].
pub fn each_item<T: Send>(items: impl Iterator<Item = T>, work: impl Fn(T) + Sync) {
    let items: Vec<_> = items.map(|item| Mutex::new(Some(item))).collect();
    each(items.len(), |part| {
        let item = items[part].lock().unwrap_or_else(PoisonError::into_inner).take();
        item.into_iter().for_each(&work);
    });
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::AtomicU32;
    use std::thread;

    use super::*;

    /// Runs `work` as the leader of `threads` threads.
    fn led<R>(threads: usize, work: impl FnOnce() -> R) -> R {
        let team = Team::new(threads);
        thread::scope(|scope| {
            (1..threads).for_each(|_| drop(scope.spawn(|| team.serve())));
            team.lead(work)
        })
    }

    #[test]
    fn every_part_of_every_loop_is_done_once() {
        for threads in [1, 2, 3, 8] {
            led(threads, || {
                for parts in (0..40).chain([1000]).cycle().take(5000) {
                    let done: Vec<AtomicU32> = (0..parts).map(|_| AtomicU32::new(0)).collect();
                    each(parts, |part| {
                        done[part].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(
                        done.iter().all(|done| done.load(Ordering::Relaxed) == 1),
                        "{threads} threads, {parts} parts"
                    );
                }
            });
        }
    }

    #[test]
    fn serving_threads_take_parts() {
        led(2, || {
            let seen = Mutex::new(HashSet::new());
            // Each part waits for a second thread to have begun one.
            each(2, |_| {
                seen.lock().unwrap().insert(thread::current().id());
                while seen.lock().unwrap().len() < 2 {
                    yield_now();
                }
            });
            assert_eq!(seen.lock().unwrap().len(), 2);
        });
    }

    #[test]
    fn a_leader_alone_does_all_parts_in_order() {
        let team = Team::new(4);
        let order = Mutex::new(Vec::new());
        team.lead(|| {
            assert_eq!(threads(), 4);
            each(6, |part| order.lock().unwrap().push(part));
        });
        each(2, |part| order.lock().unwrap().push(part));
        assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4, 5, 0, 1]);
        assert_eq!(threads(), 1);
    }

    #[test]
    fn loops_within_parts_are_not_spread() {
        led(3, || {
            let done = AtomicUsize::new(0);
            each(9, |_| {
                assert_eq!(threads(), 1);
                each(5, |_| {
                    done.fetch_add(1, Ordering::Relaxed);
                });
            });
            assert_eq!((done.load(Ordering::Relaxed), threads()), (45, 3));
        });
    }

    #[test]
    fn items_are_handed_out_once_and_changes_are_seen() {
        let mut numbers = vec![1; 1000];
        led(3, || each_item(numbers.chunks_mut(7), |chunk| chunk.iter_mut().for_each(|number| *number += 1)));
        assert!(numbers.iter().all(|number| *number == 2));
    }

    #[test]
    fn a_panic_reaches_the_leader_after_all_parts_and_the_team_goes_on() {
        led(3, || {
            let done = AtomicUsize::new(0);
            let result = catch_unwind(AssertUnwindSafe(|| {
                each(20, |part| {
                    done.fetch_add(1, Ordering::Relaxed);
                    assert_ne!(part, 7, "part seven");
                });
            }));
            let panic = result.unwrap_err();
            assert!(panic.downcast_ref::<String>().unwrap().contains("part seven"));
            assert_eq!(done.swap(0, Ordering::Relaxed), 20);
            each(20, |_| {
                done.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(done.load(Ordering::Relaxed), 20);
        });
    }

    #[test]
    fn a_panic_of_the_leader_dismisses_the_others() {
        let result = catch_unwind(|| led(3, || panic!("the leader")));
        assert!(result.is_err());
        assert_eq!(threads(), 1);
    }
}
