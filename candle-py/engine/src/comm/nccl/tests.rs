//! Claims about a group over NCCL, on a scripted NCCL and device. What NCCL and a device themselves do is not tested here.

use std::net::TcpListener;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::calls::Calls;
use super::fake::{Counts, Fake, Fault, STREAM};
use super::{Communicator, Nccl};
use crate::comm::Tcp;
use crate::error::{Error, Result};
use crate::placement::Device;
use crate::{Engine, LoadOptions};

const LONG: Duration = Duration::from_secs(120);
const SHORT: Duration = Duration::from_millis(500);

/// Runs `work` on every rank of a group, each a thread with its TCP rank and its scripted library.
fn on_ranks<T: Send>(
    faults: &[Fault],
    timeout: Duration,
    work: impl Fn(usize, Arc<Tcp>, Arc<Fake>, Duration) -> T + Sync,
) -> Vec<T> {
    let world = faults.len();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses = [listener.local_addr().unwrap().to_string()];
    let fabric = Arc::default();
    let (listener, addresses, fabric, work) = (&Mutex::new(Some(listener)), &addresses, &fabric, &work);
    thread::scope(|scope| {
        let ranks: Vec<_> = faults
            .iter()
            .enumerate()
            .map(|(rank, fault)| {
                scope.spawn(move || {
                    let tcp = match rank {
                        0 => Tcp::host(listener.lock().unwrap().take().unwrap(), world, "secret", LONG),
                        _ => Tcp::connect(rank, world, addresses, "secret", LONG),
                    };
                    work(rank, Arc::new(tcp.unwrap()), Arc::new(Fake::new(fabric, rank, world, *fault)), timeout)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn join(tcp: Arc<Tcp>, fake: &Arc<Fake>, timeout: Duration) -> Result<Nccl> {
    Nccl::join(tcp, Ok(Arc::clone(fake) as Arc<dyn Calls>), 0, None, timeout)
}

fn count(count: &AtomicUsize) -> usize {
    count.load(Ordering::SeqCst)
}

#[test]
fn ranks_sum_gather_and_broadcast_whatever_nccl_answers_at_first() {
    for world in 1..=4 {
        on_ranks(&vec![Fault::None; world], LONG, |rank, tcp, fake, timeout| {
            let nccl = join(tcp, &fake, timeout).unwrap();
            assert_eq!((nccl.rank(), nccl.world()), (rank, world));
            for length in [0, 1, 5, 1000] {
                let mut values: Vec<f32> = (0..length).map(|place| (place + rank) as f32).collect();
                nccl.all_reduce_sum(&mut values).unwrap();
                let ranks: usize = (0..world).sum();
                assert_eq!(values, (0..length).map(|place| (place * world + ranks) as f32).collect::<Vec<_>>());
            }
            let mut all = vec![1.0];
            nccl.all_gather(&vec![rank as f32; rank], &mut all).unwrap();
            assert_eq!(all, (0..world).flat_map(|rank| vec![rank as f32; rank]).collect::<Vec<_>>());
            let mut bytes = if rank == 0 { b"order".to_vec() } else { Vec::new() };
            nccl.broadcast_bytes(&mut bytes).unwrap();
            assert_eq!(bytes, b"order");
            nccl.check().unwrap();
            nccl.barrier().unwrap();
        });
    }
}

#[test]
fn numbers_in_device_memory_are_summed_where_they_are() {
    on_ranks(&[Fault::None; 2], LONG, |rank, tcp, fake, timeout| {
        let nccl = join(tcp, &fake, timeout).unwrap();
        let address = fake.allocate(12).unwrap();
        let allocated = count(&fake.counts.allocated);
        fake.write(address, &[1.0, 2.0, rank as f32]).unwrap();
        let device = nccl.on_device().unwrap();
        // SAFETY: memory of the scripted device.
        unsafe { device.all_reduce_sum_at(address, 3, STREAM) }.unwrap();
        let mut sum = [0.0; 3];
        fake.read(address, &mut sum).unwrap();
        assert_eq!(sum, [2.0, 4.0, 1.0]);
        assert_eq!(count(&fake.counts.allocated), allocated, "nothing goes through other memory");
    });
}

#[test]
fn a_group_that_ends_well_finalizes_and_destroys_once_and_gives_its_memory_back() {
    on_ranks(&[Fault::None; 2], LONG, |_, tcp, fake, timeout| {
        let nccl = join(tcp, &fake, timeout).unwrap();
        nccl.all_reduce_sum(&mut [1.0]).unwrap();
        nccl.all_reduce_sum(&mut [1.0; 100]).unwrap();
        drop(nccl);
        let Counts { finalized, destroyed, aborted, allocated, freed } = &*fake.counts;
        assert_eq!([finalized, destroyed, aborted].map(count), [1, 1, 0]);
        assert_eq!(count(allocated), count(freed));
        assert!(count(allocated) >= 2, "a larger operation needs more than the first ones");
    });
}

#[test]
fn an_end_that_does_not_come_becomes_an_abort() {
    on_ranks(&[Fault::NeverEnds], SHORT, |_, tcp, fake, timeout| {
        drop(join(tcp, &fake, timeout).unwrap());
        let Counts { finalized, destroyed, aborted, .. } = &*fake.counts;
        assert_eq!([finalized, destroyed, aborted].map(count), [1, 0, 1]);
    });
}

#[test]
fn a_silent_rank_is_an_error_at_the_deadline_and_the_group_is_over() {
    let errors = on_ranks(&[Fault::None, Fault::Silent], SHORT, |_, tcp, fake, _| {
        let nccl = join(tcp, &fake, Duration::from_secs(1)).unwrap();
        let error = nccl.all_reduce_sum(&mut [1.0]).unwrap_err();
        assert!(matches!(error, Error::Communicator { .. }));
        let first = error.to_string();
        assert_eq!(nccl.barrier().unwrap_err().to_string(), first);
        assert_eq!(nccl.all_reduce_sum(&mut [1.0]).unwrap_err().to_string(), first);
        assert_eq!(nccl.check().unwrap_err().to_string(), first);
        drop(nccl);
        let Counts { finalized, destroyed, aborted, .. } = &*fake.counts;
        assert_eq!([finalized, destroyed, aborted].map(count), [0, 0, 1], "let go of once");
        first
    });
    assert!(errors.iter().any(|error| error == "a rank was silent for 1 s in a sum"), "{errors:?}");
}

#[test]
fn an_error_that_nccl_reports_is_told_with_its_words() {
    on_ranks(&[Fault::Broken, Fault::Silent], LONG, |rank, tcp, fake, timeout| {
        let nccl = join(tcp, &fake, timeout).unwrap();
        let error = nccl.all_reduce_sum(&mut [1.0]).unwrap_err().to_string();
        if rank == 0 {
            assert_eq!(error, "NCCL failed: ncclRemoteError: said by the library");
        }
        assert_eq!(count(&fake.counts.aborted), 1);
    });
}

#[test]
fn a_rank_that_closes_its_connection_is_noticed_long_before_the_deadline() {
    on_ranks(&[Fault::None, Fault::None, Fault::None], LONG, |rank, tcp, fake, timeout| {
        let nccl = join(tcp, &fake, timeout).unwrap();
        if rank == 1 {
            return; // as if it were killed: its sockets close
        }
        let error = nccl.all_reduce_sum(&mut [1.0]).unwrap_err().to_string();
        assert!(error.ends_with("closed its connection"), "{error}");
        assert_eq!(count(&fake.counts.aborted), 1);
    });
}

#[test]
fn an_abort_from_another_thread_ends_a_wait() {
    on_ranks(&[Fault::Silent], LONG, |_, tcp, fake, timeout| {
        let nccl = join(tcp, &fake, timeout).unwrap();
        thread::scope(|scope| {
            let sum = scope.spawn(|| nccl.all_reduce_sum(&mut [1.0]).unwrap_err().to_string());
            nccl.abort("the job is over");
            assert_eq!(sum.join().unwrap(), "the job is over");
        });
        assert_eq!(nccl.barrier().unwrap_err().to_string(), "the job is over");
        assert_eq!(count(&fake.counts.aborted), 1);
    });
}

#[test]
fn an_abort_that_never_comes_back_holds_nobody() {
    on_ranks(&[Fault::HangingAbort], Duration::from_secs(1), |_, tcp, fake, timeout| {
        let (release, hang): (Sender<()>, _) = channel();
        *fake.hang.lock().unwrap() = Some(hang);
        let nccl = join(tcp, &fake, timeout).unwrap();
        nccl.abort("enough");
        assert_eq!(nccl.all_reduce_sum(&mut [1.0]).unwrap_err().to_string(), "enough");
        drop(nccl);
        assert_eq!(count(&fake.counts.aborted), 1);
        drop(release);
    });
}

#[test]
fn a_start_that_does_not_come_or_is_refused_is_an_error_on_all_ranks() {
    for (fault, text) in [
        (Fault::NeverStarts, "a rank was silent for 0.5 s in the start of NCCL"),
        (Fault::RefusesToStart, "NCCL failed: ncclInvalidUsage: said by the library"),
    ] {
        let errors = on_ranks(&[Fault::None, fault], SHORT, |rank, tcp, fake, timeout| {
            let error = join(tcp, &fake, if rank == 0 { LONG } else { timeout }).unwrap_err();
            assert!(matches!(error, Error::Communicator { .. }));
            error.to_string()
        });
        assert_eq!(errors[1], text);
    }
}

#[test]
fn a_rank_without_nccl_tells_the_others_before_they_wait_for_it() {
    let errors = on_ranks(&[Fault::None, Fault::None], LONG, |rank, tcp, fake, timeout| {
        let calls = match rank {
            0 => Ok(Arc::clone(&fake) as Arc<dyn Calls>),
            _ => Err(Error::device("NCCL cannot be loaded: `libnccl.so.2`")),
        };
        let error = Nccl::join(tcp, calls, 0, None, timeout).unwrap_err();
        assert!(matches!(error, Error::Device { .. }));
        error.to_string()
    });
    assert_eq!(errors, ["other ranks cannot use NCCL, so many of them: `1`", "NCCL cannot be loaded: `libnccl.so.2`"]);
}

#[test]
fn a_device_without_memory_ends_the_group_with_its_reason() {
    on_ranks(&[Fault::NoMemory], LONG, |_, tcp, fake, timeout| {
        let error = join(tcp, &fake, timeout).unwrap_err().to_string();
        assert_eq!(error, "no device memory for 8 bytes: `CUDA_ERROR_OUT_OF_MEMORY (2)`");
        assert_eq!(count(&fake.counts.aborted), 1);
    });
}

#[test]
fn a_model_on_another_device_than_its_group_is_refused() {
    on_ranks(&[Fault::None], LONG, |_, tcp, fake, timeout| {
        let communicator: Arc<dyn Communicator> = Arc::new(join(tcp, &fake, timeout).unwrap());
        let options =
            LoadOptions { device: Device::Cuda(1), communicator: Some(communicator), ..LoadOptions::default() };
        let error = Engine::load(Path::new("nowhere"), &options).err().unwrap();
        assert!(matches!(error, Error::Input { .. }));
        assert_eq!(error.to_string(), "model and communicator are on different devices, cuda:1 and: `cuda:0`");
    });
}

#[test]
fn a_group_whose_first_sum_is_wrong_is_refused() {
    on_ranks(&[Fault::None, Fault::Wrong], LONG, |_, tcp, fake, timeout| {
        let error = join(tcp, &fake, timeout).unwrap_err().to_string();
        assert_eq!(error, "NCCL gives a wrong sum of ranks or their wrong order: `[3.0, 2.0] [0.0, 2.0]`");
        assert_eq!(count(&fake.counts.aborted), 1);
    });
}
