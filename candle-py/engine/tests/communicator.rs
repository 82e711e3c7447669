//! The TCP communicator with threads as ranks over real loopback sockets: sums, gathered rows, orders, and every way in
//! which a rank can fail the others.

#![allow(clippy::unwrap_used)]

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use candle_engine::comm::{Communicator, Tcp};
use common::{Random, group};

const WORLDS: [usize; 5] = [1, 2, 3, 4, 8];
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(600);

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

fn values(rank: usize, length: usize) -> Vec<f32> {
    let mut random = Random::new(7 + rank as u64);
    (0..length).map(|_| random.number() * 10_f32.powi((random.below(7)) as i32 - 3)).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn sums_are_added_in_rank_order_and_all_ranks_hold_equal_bits() {
    // The largest is far above a socket's buffer; those around 16384 go whole or in parts.
    const SIZES: [usize; 8] = [0, 1, 2, 7, 16_383, 16_384, 16_389, 3_000_001];
    for world in WORLDS {
        let found = group(world, LONG, |tcp| {
            SIZES.map(|size| {
                let mut own = values(tcp.rank(), size);
                tcp.all_reduce_sum(&mut own).unwrap();
                own
            })
        });
        for (index, size) in SIZES.into_iter().enumerate() {
            let mut wanted = values(0, size);
            for rank in 1..world {
                wanted.iter_mut().zip(values(rank, size)).for_each(|(sum, value)| *sum += value);
            }
            for sums in &found {
                assert!(bits(&sums[index]) == bits(&wanted), "world {world}, {size} numbers");
            }
        }
    }
}

#[test]
fn gathered_rows_stand_in_rank_order_whatever_their_lengths() {
    for world in WORLDS {
        let length = |rank: usize| [0, 1, 5, 400_001][rank % 4];
        let found = group(world, LONG, |tcp| {
            let mut out = vec![1.0; 3];
            tcp.all_gather(&values(tcp.rank(), length(tcp.rank())), &mut out).unwrap();
            out
        });
        let wanted: Vec<f32> = (0..world).flat_map(|rank| values(rank, length(rank))).collect();
        for gathered in found {
            assert!(bits(&gathered) == bits(&wanted), "world {world}");
        }
    }
}

#[test]
fn bytes_of_rank_0_reach_everyone() {
    for world in WORLDS {
        for size in [0, 1, 1001, 5_000_003] {
            let sent: Vec<u8> = (0..size).map(|index| (index % 251) as u8).collect();
            let found = group(world, LONG, |tcp| {
                let mut bytes = if tcp.rank() == 0 { sent.clone() } else { vec![9; 4] };
                tcp.broadcast_bytes(&mut bytes).unwrap();
                tcp.barrier().unwrap();
                bytes
            });
            assert!(found.iter().all(|bytes| *bytes == sent), "world {world}, {size} bytes");
        }
    }
}

#[test]
fn many_operations_of_all_kinds_follow_each_other() {
    for world in [2, 3, 8] {
        group(world, LONG, |tcp| {
            let mut random = Random::new(3);
            let mut gathered = Vec::new();
            for round in 0..200 {
                let size = random.below(3000) as usize;
                match random.below(4) {
                    0 => {
                        let mut own = vec![1.0; size];
                        tcp.all_reduce_sum(&mut own).unwrap();
                        assert!(own.iter().all(|value| *value == world as f32));
                    }
                    1 => {
                        tcp.all_gather(&[tcp.rank() as f32], &mut gathered).unwrap();
                        assert!(gathered.iter().enumerate().all(|(rank, value)| *value == rank as f32));
                    }
                    2 => {
                        let mut bytes = if tcp.rank() == 0 { vec![round as u8; size] } else { Vec::new() };
                        tcp.broadcast_bytes(&mut bytes).unwrap();
                        assert_eq!(bytes, vec![round as u8; size]);
                    }
                    _ => tcp.barrier().unwrap(),
                }
            }
        });
    }
}

#[test]
fn nobody_passes_a_barrier_before_all_have_come() {
    let arrived = std::sync::atomic::AtomicUsize::new(0);
    group(4, LONG, |tcp| {
        for round in 1..=50 {
            arrived.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            tcp.barrier().unwrap();
            assert!(arrived.load(std::sync::atomic::Ordering::SeqCst) >= 4 * round);
            tcp.barrier().unwrap();
        }
    });
}

#[test]
fn every_rank_may_listen_at_an_address_of_its_own() {
    let addresses: Vec<String> = (0..3).map(|_| listener().1.to_string()).collect();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank| {
                let addresses = &addresses;
                scope.spawn(move || {
                    let tcp = Tcp::connect(rank, 3, addresses, "secret", LONG).unwrap();
                    let mut own = [rank as f32];
                    tcp.all_reduce_sum(&mut own).unwrap();
                    own[0]
                })
            })
            .collect();
        assert!(ranks.into_iter().all(|rank| rank.join().unwrap() == 3.0));
    });
}

#[test]
fn a_rank_that_goes_in_the_middle_ends_the_group_at_once_on_all_others() {
    for (world, size) in [(2, 10), (2, 100_000), (3, 10), (3, 100_000), (4, 10), (8, 10), (8, 100_000)] {
        let started = Instant::now();
        let found = group(world, LONG, |tcp| {
            tcp.barrier().unwrap();
            if tcp.rank() == world - 1 {
                return None; // its sockets close, as when a process dies
            }
            let first = tcp.all_reduce_sum(&mut vec![1.0; size]).unwrap_err();
            let again = tcp.barrier().unwrap_err();
            assert_eq!(first.to_string(), again.to_string());
            Some(first.to_string())
        });
        for text in found.into_iter().flatten() {
            assert!(text.ends_with(" closed its connection, in `all_reduce_sum`"), "{text}");
            // A rank that must break off in the middle of a large message cannot say why.
            let gone = format!("rank {} closed", world - 1);
            assert!(size > 10 || text.contains(&gone), "{text}");
        }
        assert!(started.elapsed() < LONG / 2);
    }
}

#[test]
fn a_silent_rank_is_told_of_at_the_deadline() {
    for world in [2, 4] {
        // The silent one lives, and holds its sockets, until the others have failed.
        let (done, wait) = channel::<()>();
        let (done, wait) = (std::sync::Mutex::new(Some(done)), std::sync::Mutex::new(wait));
        let failed = std::sync::atomic::AtomicUsize::new(0);
        let found = group(world, SHORT, |tcp| {
            tcp.barrier().unwrap();
            if tcp.rank() == 1 {
                wait.lock().unwrap().recv_timeout(LONG).unwrap_err();
                return None;
            }
            let started = Instant::now();
            let error = tcp.all_reduce_sum(&mut vec![1.0; 500_000]).unwrap_err();
            assert!(started.elapsed() >= SHORT / 2);
            if failed.fetch_add(1, std::sync::atomic::Ordering::SeqCst) + 2 == world {
                done.lock().unwrap().take();
            }
            Some(error.to_string())
        });
        for text in found.into_iter().flatten() {
            assert!(text.contains("gave no answer for 0.6 s, in `all_reduce_sum`"), "{text}");
        }
    }
}

#[test]
fn followers_wait_for_orders_longer_than_the_deadline_while_rank_0_lives() {
    let (done, wait) = channel::<()>();
    let (done, wait) = (std::sync::Mutex::new(done), std::sync::Mutex::new(wait));
    group(2, SHORT, |tcp| {
        let mut bytes = vec![1];
        if tcp.rank() == 0 {
            // Time passes in which the caller asks for nothing.
            wait.lock().unwrap().recv_timeout(SHORT * 4).unwrap_err();
            tcp.broadcast_bytes(&mut bytes).unwrap();
        } else {
            let started = Instant::now();
            tcp.broadcast_bytes(&mut bytes).unwrap();
            assert!(started.elapsed() > SHORT * 2);
        }
        tcp.barrier().unwrap();
    });
    drop(done);
}

#[test]
fn an_abort_from_another_thread_frees_whoever_waits_on_every_rank() {
    let found = group(3, LONG, |tcp| match tcp.rank() {
        0 => {
            tcp.barrier().unwrap();
            tcp.abort("the caller has had enough: `0`");
            tcp.barrier().unwrap_err().to_string()
        }
        _ => {
            tcp.barrier().unwrap();
            tcp.broadcast_bytes(&mut Vec::new()).unwrap_err().to_string()
        }
    });
    assert_eq!(found[0], "the caller has had enough: `0`");
    for text in &found[1..] {
        assert_eq!(text, "rank 0 gave up: the caller has had enough: `0`");
    }
    // The waiting operation holds the connections while it is aborted.
    let over = std::sync::Barrier::new(2);
    group(2, LONG, |tcp| {
        if tcp.rank() == 0 {
            over.wait();
            return assert!(tcp.barrier().is_err());
        }
        thread::scope(|scope| {
            let waiting = scope.spawn(|| tcp.broadcast_bytes(&mut Vec::new()).unwrap_err().to_string());
            tcp.abort("stopped: `here`");
            assert_eq!(waiting.join().unwrap(), "stopped: `here`");
        });
        over.wait();
    });
}

#[test]
fn ranks_that_do_different_things_are_told_apart() {
    let found = group(2, LONG, |tcp| {
        let result = if tcp.rank() == 0 { tcp.barrier() } else { tcp.all_reduce_sum(&mut [1.0]) };
        result.unwrap_err().to_string()
    });
    assert!(found.iter().any(|text| text.contains("is out of step, at its")), "{found:?}");
    let found = group(2, LONG, |tcp| tcp.all_reduce_sum(&mut vec![1.0; 3 + tcp.rank()]).unwrap_err().to_string());
    assert!(found.iter().any(|text| text.contains("sent a message of an unexpected size")), "{found:?}");
}

#[test]
fn a_rank_that_never_arrives_is_named_at_the_deadline() {
    let (listener, address) = listener();
    thread::scope(|scope| {
        let other = scope.spawn(|| Tcp::connect(1, 3, &[address.to_string()], "secret", LONG).unwrap_err().to_string());
        let error = Tcp::host(listener, 3, "secret", SHORT).unwrap_err();
        assert_eq!(error.to_string(), "ranks did not arrive within 0.6 s: `2`");
        assert_eq!(other.join().unwrap(), "rank 0 refuses: ranks did not arrive within 0.6 s: `2`");
    });
    let nobody = listener_address_of_nobody();
    let error = Tcp::connect(1, 2, std::slice::from_ref(&nobody), "secret", SHORT).unwrap_err();
    assert!(error.to_string().starts_with("rank 0 cannot be reached within 0.6 s ("), "{error}");
    assert!(error.to_string().ends_with(&format!("): `{nobody}`")), "{error}");
}

fn listener_address_of_nobody() -> String {
    listener().1.to_string()
}

#[test]
fn strangers_are_refused_and_the_group_comes_together_all_the_same() {
    let (listener, address) = listener();
    let addresses = [address.to_string()];
    thread::scope(|scope| {
        let host = scope.spawn(move || Tcp::host(listener, 2, "secret", LONG).unwrap());
        // One says nothing, one speaks another language, one has another token.
        let silent = TcpStream::connect(address).unwrap();
        let mut browser = TcpStream::connect(address).unwrap();
        browser.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        assert_eq!(browser.read(&mut [0; 100]).unwrap_or(0), 0);
        for token in ["secreT", "secret ", "s"] {
            let error = Tcp::connect(1, 2, &addresses, token, LONG).unwrap_err();
            assert_eq!(error.to_string(), "rank 0 refuses: the token is not this group's");
        }
        let rank = scope.spawn(|| Tcp::connect(1, 2, &addresses, "secret", LONG).unwrap().barrier());
        host.join().unwrap().barrier().unwrap();
        rank.join().unwrap().unwrap();
        drop(silent);
    });
}

#[test]
fn other_worlds_and_ranks_that_are_taken_end_the_gathering() {
    for (rank, world, text) in
        [(1, 3, "rank 1 is of a world of 3, rank 0 of one of `2`"), (0, 2, "two processes have the same rank: `0`")]
    {
        let (listener, address) = listener();
        thread::scope(|scope| {
            let host = scope.spawn(move || Tcp::host(listener, 2, "secret", LONG).unwrap_err().to_string());
            let other = scope.spawn(move || {
                if rank > 0 {
                    let error = Tcp::connect(rank, world, &[address.to_string()], "secret", LONG).unwrap_err();
                    assert_eq!(error.to_string(), format!("rank 0 refuses: {text}"));
                } else {
                    let mut hello = b"candle\x01\n".to_vec();
                    hello.extend([0, 0, 0, 0, 2, 0, 0, 0, 6, 0, 0, 0]);
                    hello.extend(b"secret");
                    TcpStream::connect(address).unwrap().write_all(&hello).unwrap();
                }
            });
            assert_eq!(host.join().unwrap(), text);
            other.join().unwrap();
        });
    }
}

#[test]
fn arguments_that_name_no_group_are_refused() {
    let one = ["127.0.0.1:1".to_owned()];
    let two = ["127.0.0.1:1".to_owned(), "127.0.0.1:2".to_owned()];
    let refused = |rank, world, addresses: &[String], token: &str, timeout| {
        Tcp::connect(rank, world, addresses, token, timeout).unwrap_err().to_string()
    };
    assert_eq!(refused(0, 0, &one, "t", SHORT), "world must be from 1 to 1024: `0`");
    assert_eq!(refused(2, 2, &one, "t", SHORT), "rank must be below the world of 2: `2`");
    assert_eq!(refused(0, 2, &one, "", SHORT), "token must have from 1 to 1024 bytes: `0`");
    assert_eq!(refused(0, 3, &two, "t", SHORT), "addresses must be rank 0's alone or those of all 3 ranks: `2`");
    assert_eq!(refused(0, 2, &one, "t", Duration::ZERO), "timeout_s must be more than 0 and at most 604800: `0`");
    assert!(refused(1, 2, &["no port".to_owned()], "t", SHORT).starts_with("address of rank 0 cannot be used"));
    Tcp::connect(0, 1, &[], "t", SHORT).unwrap().barrier().unwrap();
}
