//! The kernels' own source against their twins, compiled for the host (`emulation/`): what a machine without a CUDA device
//! can tell of them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use super::{
    AddBias, AddBiasAndResidual, Attend, AttendCached, Gate, Kernel, MOST_HEAD_DIM, Norm, NormHeads, Pool, Rotate,
    Scalar, Source, TileList, WriteCache,
};
use crate::backend::Attention;
use crate::cpu::Activation;
use crate::cuda::attention::block_floats;
use crate::generate::{BLOCK_TOKENS, Logits, StepSequence};
use crate::pooling::PoolingMode;

/// float32 against the twins' f64, for sums of up to some thousand numbers between -1 and 1.
const TOLERANCE: f32 = 2e-6;

/// The program that runs the kernels, compiled once; none where there is no compiler.
fn program() -> Option<&'static Path> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/emulation/main.cpp");
        let target = std::env::current_exe().unwrap().with_extension("kernels");
        let run = |compiler: &str| {
            let options =
                ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing", "-D_FORTIFY_SOURCE=0"];
            Command::new(compiler).args(options).arg("-o").args([&target, &source]).output()
        };
        let output = ["c++", "g++", "clang++"].into_iter().find_map(|compiler| run(compiler).ok())?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Some(target)
    };
    let program = PROGRAM.get_or_init(build).as_deref();
    if program.is_none() {
        eprintln!("skipped: no C++ compiler is there to compile the kernels for the host");
    }
    program
}

/// What the kernel makes of `out`.
fn emulated<K: Kernel>(program: &Path, kernel: &K, sources: &[Source<'_>], out: &[f32]) -> Vec<f32> {
    let launch = kernel.launch();
    let mut call: Vec<u32> = vec![launch.function.len() as u32];
    let name = launch.function.as_bytes().chunks(4);
    call.extend(name.map(|four| four.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte))));
    call.extend(launch.grid.iter().chain([&launch.threads, &launch.shared_floats]).map(|number| *number as u32));
    call.push(1 + sources.len() as u32);
    let mut buffer = |numbers: &mut dyn ExactSizeIterator<Item = u32>| {
        call.push(numbers.len() as u32);
        call.extend(numbers);
    };
    buffer(&mut out.iter().map(|number| number.to_bits()));
    for source in sources {
        match source {
            Source::Floats(numbers) => buffer(&mut numbers.iter().map(|number| number.to_bits())),
            Source::Wholes(numbers) => buffer(&mut numbers.iter().copied()),
        }
    }
    call.push(launch.scalars.len() as u32);
    call.extend(launch.scalars.iter().map(|scalar| match scalar {
        Scalar::Whole(number) => *number as u32,
        Scalar::Float(number) => number.to_bits(),
    }));
    let bytes: Vec<u8> = call.iter().flat_map(|number| number.to_ne_bytes()).collect();
    let mut child =
        Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    let writer = std::thread::spawn(move || input.write_all(&bytes));
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {} {told}", launch.function, output.status);
    writer.join().unwrap().unwrap();
    output.stdout.as_chunks().0.iter().map(|number| f32::from_ne_bytes(*number)).collect()
}

/// Runs kernel and twin; how far they are apart. `out` is what there is before, `None` where all of it is written.
fn apart<K: Kernel>(program: &Path, kernel: &K, sources: &[Source<'_>], out: Option<&[f32]>) -> f32 {
    let lengths: Vec<usize> = sources.iter().map(|source| source.len()).collect();
    let wanted = kernel.sources();
    let told = wanted.iter().map(|size| match size {
        super::Size::Floats(count) | super::Size::Wholes(count) => *count,
    });
    assert_eq!(told.collect::<Vec<_>>(), lengths);
    let before = out.map_or_else(|| vec![f32::NAN; kernel.out_len()], <[f32]>::to_vec);
    assert_eq!(before.len(), kernel.out_len());
    let found = emulated(program, kernel, sources, &before);
    let mut wanted = before;
    kernel.twin(sources, &mut wanted);
    assert_eq!(found.len(), wanted.len());
    found.iter().zip(&wanted).fold(0.0, |most, (found, wanted)| match found.is_nan() || wanted.is_nan() {
        true if found.is_nan() && wanted.is_nan() => most,
        true => f32::INFINITY,
        false if found == wanted => most,
        false => most.max((found - wanted).abs()),
    })
}

/// Numbers between -1 and 1 that look random and are the same everywhere.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u32 {
        // Knuth's MMIX generator.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next() as f32 / (1_u32 << 30) as f32 - 1.0).collect()
    }

    /// The numbers below `count` in some order.
    fn shuffled(&mut self, count: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..count as u32).collect();
        (1..count).rev().for_each(|at| all.swap(at, self.next() as usize % (at + 1)));
        all
    }
}

fn attention(heads: usize, kv_heads: usize, head_dim: usize, causal: bool, window: Option<usize>) -> Attention {
    Attention { heads, kv_heads, head_dim, causal, window }
}

const SHAPES: [(usize, usize, usize); 7] =
    [(2, 2, 32), (4, 2, 16), (7, 1, 20), (3, 3, 6), (20, 1, 2), (2, 1, 128), (1, 1, MOST_HEAD_DIM)];

fn offsets(lengths: &[usize]) -> Vec<usize> {
    let ends = lengths.iter().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

#[test]
fn attention_of_whole_sequences_is_the_twins() {
    let Some(program) = program() else { return };
    let mut numbers = Numbers(1);
    for (heads, kv_heads, head_dim) in SHAPES {
        for (causal, window) in
            [(false, None), (true, None), (false, Some(0)), (false, Some(5)), (true, Some(1)), (true, Some(33))]
        {
            let offsets = offsets(&[1, 17, 70, 16, 33]);
            let rows = offsets.last().copied().unwrap();
            let attention = &attention(heads, kv_heads, head_dim, causal, window);
            // Scores of some size, so that weights are not all alike.
            let qkv: Vec<f32> = numbers.floats(rows * attention.qkv_width()).iter().map(|x| x * 3.0).collect();
            let list = TileList::of_sequences(&offsets);
            let kernel = Attend { attention, rows, tiles: [list.tiles, list.numbers.len()] };
            let apart = apart(program, &kernel, &[Source::Floats(&qkv), Source::Wholes(&list.numbers)], None);
            assert!(apart <= 4.0 * TOLERANCE, "{attention:?}: {apart}");
        }
    }
}

#[test]
fn scores_that_rise_and_fall_far_apart_are_weighed_alike() {
    let Some(program) = program() else { return };
    let mut numbers = Numbers(2);
    let attention = &attention(2, 1, 32, false, None);
    let (rows, width) = (100, attention.qkv_width());
    let mut qkv = numbers.floats(rows * width);
    // Keys that grow and shrink along the sequence: the greatest score is in no tile's favour.
    for (row, numbers) in qkv.chunks_exact_mut(width).enumerate() {
        let size = 40.0 * ((row as f32 * 0.13).sin() + 1.0);
        numbers[64..96].iter_mut().for_each(|key| *key *= size);
    }
    let list = TileList::of_sequences(&[0, rows]);
    let kernel = Attend { attention, rows, tiles: [list.tiles, list.numbers.len()] };
    let apart = apart(program, &kernel, &[Source::Floats(&qkv), Source::Wholes(&list.numbers)], None);
    // Scores of up to some hundred have their last digits at 2^-16.
    assert!(apart <= 1e-4, "{apart}");
}

#[test]
fn a_row_that_is_not_a_number_spoils_those_that_see_it_and_no_others() {
    let Some(program) = program() else { return };
    let mut numbers = Numbers(3);
    for (causal, window) in [(false, None), (true, None), (true, Some(3)), (false, Some(3))] {
        let attention = &attention(2, 2, 16, causal, window);
        let (rows, width) = (60, attention.qkv_width());
        let mut qkv = numbers.floats(rows * width);
        qkv[30 * width..31 * width].fill(f32::NAN);
        let list = TileList::of_sequences(&[0, 20, 60]);
        let kernel = Attend { attention, rows, tiles: [list.tiles, list.numbers.len()] };
        let sources = [Source::Floats(&qkv), Source::Wholes(&list.numbers)];
        let found = emulated(program, &kernel, &sources, &vec![0.0; kernel.out_len()]);
        let is_bad = |row: &[f32]| row.iter().any(|value| value.is_nan());
        let bad: Vec<usize> =
            (found.chunks(32).enumerate()).filter(|(_, row)| is_bad(row)).map(|(row, _)| row).collect();
        let sees = |row: &usize| {
            *row >= 20 && (!causal || *row >= 30) && window.is_none_or(|window| row.abs_diff(30) <= window)
        };
        assert_eq!(bad, (0..rows).filter(sees).collect::<Vec<_>>(), "{attention:?}");
        assert!(apart(program, &kernel, &sources, None) <= 4.0 * TOLERANCE);
    }
}

#[test]
fn attention_to_the_cache_is_the_twins_wherever_blocks_lie() {
    let Some(program) = program() else { return };
    let mut numbers = Numbers(4);
    for (heads, kv_heads, head_dim) in SHAPES {
        for window in [None, Some(0), Some(20)] {
            let attention = &attention(heads, kv_heads, head_dim, true, window);
            // Tokens in the cache, and new ones.
            let cuts = [(0, 1), (40, 1), (16, 1), (15, 18), (0, 35), (31, 1)];
            let blocks = 20;
            let mut free = numbers.shuffled(blocks);
            let mut rows = 0;
            let sequences = cuts.map(|(start, new)| {
                let own = free.split_off(free.len() - usize::div_ceil(start + new, BLOCK_TOKENS));
                rows += new;
                StepSequence { tokens: rows - new..rows, start, blocks: own, logits: Logits::Last }
            });
            let qkv = numbers.floats(rows * attention.qkv_width());
            // What no sequence has written is not a number, and must reach none.
            let mut pages = vec![f32::NAN; blocks * block_floats(kv_heads, head_dim)];
            for sequence in &sequences {
                for at in 0..sequence.start + sequence.tokens.len() {
                    let page = sequence.blocks[at / BLOCK_TOKENS] as usize * block_floats(kv_heads, head_dim);
                    for head in 0..2 * kv_heads {
                        let place = page + (head * BLOCK_TOKENS + at % BLOCK_TOKENS) * head_dim;
                        pages[place..place + head_dim].copy_from_slice(&numbers.floats(head_dim));
                    }
                }
            }
            let list = TileList::of_steps(&sequences);
            let kernel = AttendCached { attention, rows, tiles: [list.tiles, list.numbers.len()], blocks };
            let sources = [Source::Floats(&qkv), Source::Floats(&pages), Source::Wholes(&list.numbers)];
            let apart = apart(program, &kernel, &sources, None);
            assert!(apart <= TOLERANCE, "{attention:?}: {apart}");
        }
    }
}

#[test]
fn the_cache_takes_keys_and_values_as_its_twin_does() {
    let Some(program) = program() else { return };
    let mut numbers = Numbers(5);
    for (heads, kv_heads, head_dim) in SHAPES {
        let attention = &attention(heads, kv_heads, head_dim, true, None);
        let (rows, blocks) = (21, 5);
        let places = numbers.shuffled(blocks * BLOCK_TOKENS).split_off(blocks * BLOCK_TOKENS - rows);
        let qkv = numbers.floats(rows * attention.qkv_width());
        let before = numbers.floats(blocks * block_floats(kv_heads, head_dim));
        let kernel = WriteCache { attention, rows, blocks };
        let apart = apart(program, &kernel, &[Source::Floats(&qkv), Source::Wholes(&places)], Some(&before));
        assert_eq!(apart, 0.0, "{attention:?}");
    }
}

#[test]
fn norms_are_the_twins_even_of_rows_with_a_large_mean() {
    let Some(program) = program() else { return };
    let mut numbers = Numbers(6);
    for width in [1, 2, 31, 32, 100, 129, 1000] {
        for (centred, bias) in [(true, true), (true, false), (false, false)] {
            // The spread of a few numbers may be as small as the last digit of their mean.
            for mean in [0.0, 100.0].into_iter().filter(|mean| *mean == 0.0 || width > 30) {
                let rows = 3;
                let x: Vec<f32> = numbers.floats(rows * width).iter().map(|x| x + mean).collect();
                let weights = numbers.floats(width * (1 + usize::from(bias)));
                let kernel = Norm { rows, width, eps: 1e-5, centred, bias };
                let apart = apart(program, &kernel, &[Source::Floats(&x), Source::Floats(&weights)], None);
                // The mean of numbers around 100 has its last digit at 2^-17, which is small beside their spread.
                let most = if centred && mean > 0.0 { 5e-5 } else { TOLERANCE };
                assert!(apart <= most, "{kernel:?} of mean {mean}: {apart}");
            }
        }
    }
}

#[test]
fn heads_are_normalised_and_turned_as_the_twins_do() {
    let Some(program) = program() else { return };
    let mut numbers = Numbers(7);
    for (heads, kv_heads, head_dim) in SHAPES {
        let attention = &attention(heads, kv_heads, head_dim, true, None);
        let rows = 5;
        let before = numbers.floats(rows * attention.qkv_width());
        let weights = numbers.floats(2 * head_dim);
        let kernel = NormHeads { attention, rows, eps: [1e-6, 1e-3] };
        let of_norm = apart(program, &kernel, &[Source::Floats(&weights)], Some(&before));
        assert!(of_norm <= TOLERANCE, "{attention:?}: {of_norm}");
        let angles = numbers.floats(rows * head_dim);
        let of_turns = apart(program, &Rotate { attention, rows }, &[Source::Floats(&angles)], Some(&before));
        assert!(of_turns <= TOLERANCE, "{attention:?}: {of_turns}");
    }
}

#[test]
fn what_follows_a_product_is_the_twins() {
    let Some(program) = program() else { return };
    let mut numbers = Numbers(9);
    let activations = [
        Activation::Identity,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::Relu,
        Activation::Silu,
        Activation::Tanh,
        Activation::Sigmoid,
    ];
    for (rows, width) in [(1, 1), (3, 255), (2, 256), (5, 300)] {
        let bias = numbers.floats(width);
        let wide = |numbers: Vec<f32>| numbers.iter().map(|x| 8.0 * x).collect::<Vec<f32>>();
        for activation in activations {
            let mut before = wide(numbers.floats(rows * width));
            before[0] = f32::NAN;
            let kernel = AddBias { rows, width, activation };
            let apart_by = apart(program, &kernel, &[Source::Floats(&bias)], Some(&before));
            assert!(apart_by <= TOLERANCE, "{kernel:?}: {apart_by}");
            let x = wide(numbers.floats(2 * rows * width));
            let kernel = Gate { rows, half: width, activation };
            let apart_by = apart(program, &kernel, &[Source::Floats(&x)], None);
            // Products of numbers up to 8.
            assert!(apart_by <= 8.0 * TOLERANCE, "{kernel:?}: {apart_by}");
        }
        let (before, residual) = (numbers.floats(rows * width), numbers.floats(rows * width));
        let kernel = AddBiasAndResidual { rows, width };
        let sources = [Source::Floats(&bias), Source::Floats(&residual)];
        assert!(apart(program, &kernel, &sources, Some(&before)) <= TOLERANCE, "{kernel:?}");
    }
}

#[test]
fn pooling_is_the_twins_bit_for_bit() {
    let Some(program) = program() else { return };
    let mut numbers = Numbers(8);
    for width in [1, 100, 300] {
        let offsets = offsets(&[1, 7, 40, 2]).iter().map(|offset| *offset as u32).collect::<Vec<_>>();
        let (rows, sequences) = (50, 4);
        let mut x = numbers.floats(rows * width);
        x[3 * width] = f32::NAN;
        for mode in PoolingMode::ALL {
            for skip in [0, 1, 3, usize::MAX] {
                let kernel = Pool { mode, rows, sequences, width, skip };
                let apart = apart(program, &kernel, &[Source::Floats(&x), Source::Wholes(&offsets)], None);
                assert_eq!(apart, 0.0, "{kernel:?}");
            }
        }
    }
}

#[test]
fn a_call_with_sources_of_another_size_is_refused() {
    let device = candle_core::Device::Cpu;
    let zeros = |count: usize| candle_core::Tensor::zeros(count, candle_core::DType::F32, &device).unwrap();
    let kernel = Norm { rows: 2, width: 8, eps: 0.0, centred: true, bias: true };
    assert!(super::fresh(&kernel, (2, 8), &[&zeros(16), &zeros(16)]).is_ok());
    for (shape, x, weights) in [((2, 8), 16, 8), ((2, 8), 15, 16), ((2, 9), 16, 16)] {
        assert!(super::fresh(&kernel, shape, &[&zeros(x), &zeros(weights)]).is_err());
    }
}
