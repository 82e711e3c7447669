//! Kernels of ours for Candle's tensors, where Candle has none or one of another precision. Each is a function in a small
//! `.cu` file, and beside it a twin in Rust, which says in the plainest form what the kernel gives. A tensor on the CPU
//! takes the twin, one on a CUDA device the kernel. All numbers are float32, all tensors contiguous.

#![cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "how kernels are called is of no use without them"))]

mod attention;
mod cache;
#[cfg(feature = "cuda")]
mod device;
#[cfg(test)]
mod emulation;
mod finish;
mod norm;
mod pool;
mod product;
mod ranks;
mod rotary;

use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, InplaceOp2, InplaceOp3, Layout, Shape, Tensor,
};

pub use attention::{Attend, AttendCached, MOST_HEAD_DIM, TileList};
pub use cache::WriteCache;
pub use finish::{AddBias, AddBiasAndResidual, Gate};
pub use norm::{Norm, NormHeads};
pub use pool::Pool;
pub use product::half_product;
pub use ranks::sum_over_ranks;
pub use rotary::Rotate;

type Result<T> = candle_core::Result<T>;

/// Numbers that a kernel reads.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    Floats(&'a [f32]),
    Wholes(&'a [u32]),
}

impl<'a> Source<'a> {
    fn len(self) -> usize {
        match self {
            Source::Floats(numbers) => numbers.len(),
            Source::Wholes(numbers) => numbers.len(),
        }
    }

    /// The floats; none where they are whole numbers, which the sizes rule out.
    fn floats(self) -> &'a [f32] {
        match self {
            Source::Floats(numbers) => numbers,
            Source::Wholes(_) => &[],
        }
    }

    /// The whole numbers; none where they are floats, which the sizes rule out.
    fn wholes(self) -> &'a [u32] {
        match self {
            Source::Wholes(numbers) => numbers,
            Source::Floats(_) => &[],
        }
    }
}

/// What a kernel expects of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// So many floats.
    Floats(usize),
    /// So many whole numbers.
    Wholes(usize),
}

/// A number that a kernel is given with its call.
#[derive(Clone, Copy, Debug)]
pub enum Scalar {
    Whole(i32),
    Float(f32),
}

/// How a kernel is called: `function(out, sources.., scalars..)`.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Its name in the file.
    pub function: &'static str,
    /// Blocks in each of three directions.
    pub grid: [usize; 3],
    /// Threads of a block.
    pub threads: usize,
    /// Floats in the memory that the threads of a block share, of those that the call decides.
    pub shared_floats: usize,
    /// The numbers after the pointers.
    pub scalars: Vec<Scalar>,
}

/// A kernel with the sizes of one call.
pub trait Kernel {
    /// The name of the `.cu` file that it is in.
    const FILE: &'static str;

    /// The compiled file.
    #[cfg(feature = "cuda")]
    const PTX: &'static str;

    /// Numbers that are written.
    fn out_len(&self) -> usize;

    /// What is read.
    fn sources(&self) -> Vec<Size>;

    /// How the kernel is called.
    fn launch(&self) -> Launch;

    /// What the kernel does, on the CPU. Sizes are as told.
    fn twin(&self, sources: &[Source<'_>], out: &mut [f32]);
}

/// The constants of a kernel in the file `$name.cu`.
macro_rules! in_file {
    ($name:literal) => {
        const FILE: &'static str = $name;
        #[cfg(feature = "cuda")]
        const PTX: &'static str = include_str!(concat!(env!("OUT_DIR"), "/", $name, ".ptx"));
    };
}
use in_file;

/// A whole number as kernels take it. Sizes of tensors are checked to be within it.
fn whole(number: usize) -> Scalar {
    Scalar::Whole(i32::try_from(number).unwrap_or(i32::MAX))
}

/// Runs a kernel whose output is a new tensor.
pub fn fresh<K: Kernel>(kernel: &K, shape: impl Into<Shape>, sources: &[&Tensor]) -> Result<Tensor> {
    let call = Fresh { kernel, shape: shape.into() };
    match sources {
        [one] => one.apply_op1_no_bwd(&call),
        [one, two] => one.apply_op2_no_bwd(two, &call),
        [one, two, three] => one.apply_op3_no_bwd(two, three, &call),
        _ => candle_core::bail!("{}: no call with so many sources: {}", K::FILE, sources.len()),
    }
}

/// Runs a kernel that changes a tensor.
pub fn in_place<K: Kernel>(kernel: &K, out: &Tensor, sources: &[&Tensor]) -> Result<()> {
    let call = InPlace { kernel };
    match sources {
        [one] => out.inplace_op2(one, &call),
        [one, two] => out.inplace_op3(one, two, &call),
        _ => candle_core::bail!("{}: no call with so many sources: {}", K::FILE, sources.len()),
    }
}

/// A kernel whose output is new.
struct Fresh<'a, K> {
    kernel: &'a K,
    shape: Shape,
}

/// A kernel that changes its output.
struct InPlace<'a, K> {
    kernel: &'a K,
}

/// Where the numbers of a contiguous tensor lie in its storage.
fn range(layout: &Layout) -> Result<std::ops::Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => candle_core::bail!("tensor is not contiguous: {layout:?}"),
    }
}

/// Checks dtypes and element counts against what a kernel expects.
fn check<K: Kernel>(kernel: &K, out_len: usize, found: &[(DType, usize)]) -> Result<()> {
    let wanted: Vec<(DType, usize)> = (kernel.sources().into_iter())
        .map(|size| match size {
            Size::Floats(count) => (DType::F32, count),
            Size::Wholes(count) => (DType::U32, count),
        })
        .collect();
    if out_len != kernel.out_len() || wanted != found {
        candle_core::bail!(
            "{}: {out_len} numbers from {found:?}, not {} from {wanted:?}",
            kernel.launch().function,
            kernel.out_len()
        );
    }
    Ok(())
}

/// Runs the twin.
fn on_host<K: Kernel>(kernel: &K, sources: &[(&CpuStorage, &Layout)], out: &mut [f32]) -> Result<()> {
    let lengths = sources.iter().map(|(storage, layout)| (storage.dtype(), layout.shape().elem_count()));
    check(kernel, out.len(), &lengths.collect::<Vec<_>>())?;
    let numbers = sources.iter().map(|(storage, layout)| {
        let range = range(layout)?;
        Ok(match storage {
            CpuStorage::U32(numbers) => Source::Wholes(&numbers[range]),
            storage => Source::Floats(&storage.as_slice::<f32>()?[range]),
        })
    });
    let numbers: Vec<Source<'_>> = numbers.collect::<Result<_>>()?;
    debug_assert!(
        numbers.iter().zip(sources).all(|(numbers, (_, layout))| numbers.len() == layout.shape().elem_count())
    );
    kernel.twin(&numbers, out);
    Ok(())
}

impl<K: Kernel> Fresh<'_, K> {
    fn on_host(&self, sources: &[(&CpuStorage, &Layout)]) -> Result<(CpuStorage, Shape)> {
        let mut out = vec![0.0; self.shape.elem_count()];
        on_host(self.kernel, sources, &mut out)?;
        Ok((CpuStorage::F32(out), self.shape.clone()))
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self, sources: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        Ok((device::fresh(self.kernel, self.shape.elem_count(), sources)?, self.shape.clone()))
    }

    #[cfg(not(feature = "cuda"))]
    fn on_device(&self, _sources: &[(&CudaStorage, &Layout)]) -> Result<(CudaStorage, Shape)> {
        candle_core::bail!("this build has no CUDA support")
    }
}

impl<K: Kernel> InPlace<'_, K> {
    fn on_host(&self, (out, layout): (&mut CpuStorage, &Layout), sources: &[(&CpuStorage, &Layout)]) -> Result<()> {
        let range = range(layout)?;
        match out {
            CpuStorage::F32(out) => on_host(self.kernel, sources, &mut out[range]),
            _ => candle_core::bail!("{}: tensor is not float32", self.kernel.launch().function),
        }
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self, out: (&mut CudaStorage, &Layout), sources: &[(&CudaStorage, &Layout)]) -> Result<()> {
        device::in_place(self.kernel, out, sources)
    }

    #[cfg(not(feature = "cuda"))]
    fn on_device(&self, _out: (&mut CudaStorage, &Layout), _sources: &[(&CudaStorage, &Layout)]) -> Result<()> {
        candle_core::bail!("this build has no CUDA support")
    }
}

/// Candle's trait `$op` on `$call`, both ways, for `$count` sources.
macro_rules! fresh_op {
    ($op:ident, $($storage:ident, $layout:ident),+) => {
        impl<K: Kernel> $op for Fresh<'_, K> {
            fn name(&self) -> &'static str {
                self.kernel.launch().function
            }

            fn cpu_fwd(&self, $($storage: &CpuStorage, $layout: &Layout),+) -> Result<(CpuStorage, Shape)> {
                self.on_host(&[$(($storage, $layout)),+])
            }

            fn cuda_fwd(&self, $($storage: &CudaStorage, $layout: &Layout),+) -> Result<(CudaStorage, Shape)> {
                self.on_device(&[$(($storage, $layout)),+])
            }
        }
    };
}

fresh_op!(CustomOp1, a, of_a);
fresh_op!(CustomOp2, a, of_a, b, of_b);
fresh_op!(CustomOp3, a, of_a, b, of_b, c, of_c);

/// The same of Candle's traits for ops in place.
macro_rules! in_place_op {
    ($op:ident, $($storage:ident, $layout:ident),+) => {
        impl<K: Kernel> $op for InPlace<'_, K> {
            fn name(&self) -> &'static str {
                self.kernel.launch().function
            }

            fn cpu_fwd(&self, out: &mut CpuStorage, of_out: &Layout, $($storage: &CpuStorage, $layout: &Layout),+) -> Result<()> {
                self.on_host((out, of_out), &[$(($storage, $layout)),+])
            }

            fn cuda_fwd(&self, out: &mut CudaStorage, of_out: &Layout, $($storage: &CudaStorage, $layout: &Layout),+) -> Result<()> {
                self.on_device((out, of_out), &[$(($storage, $layout)),+])
            }
        }
    };
}

in_place_op!(InplaceOp2, a, of_a);
in_place_op!(InplaceOp3, a, of_a, b, of_b);
