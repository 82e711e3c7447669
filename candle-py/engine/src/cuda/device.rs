//! The kernels on a CUDA device: Candle loads their compiled files and keeps them; here they are called.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{
    CudaView, CudaViewMut, LaunchConfig, PushKernelArg, sys::CUfunction_attribute_enum as Attribute,
};
use candle_core::{CudaDevice, CudaStorage, DType, Layout};

use super::{Kernel, Launch, Result, Scalar, check, range};

/// Bytes that a block of threads may share without being asked.
const SHARED_BYTES: usize = 48 << 10;

/// What a kernel reads, on the device.
enum View<'a> {
    Floats(CudaView<'a, f32>),
    Wholes(CudaView<'a, u32>),
}

/// Runs a kernel whose output is new; all of it is written.
pub fn fresh<K: Kernel>(kernel: &K, len: usize, sources: &[(&CudaStorage, &Layout)]) -> Result<CudaStorage> {
    let Some((first, _)) = sources.first() else { candle_core::bail!("{}: no sources", K::FILE) };
    let device = first.device().clone();
    // SAFETY: every kernel with a new output writes all of its numbers, and nothing reads them before.
    let mut out = unsafe { device.alloc::<f32>(len)? };
    let whole = 0..len;
    let Some(view) = out.try_slice_mut(whole) else { candle_core::bail!("{}: no output", K::FILE) };
    call(kernel, &device, view, sources)?;
    Ok(CudaStorage::wrap_cuda_slice(out, device))
}

/// Runs a kernel that changes its output.
pub fn in_place<K: Kernel>(
    kernel: &K,
    (out, layout): (&mut CudaStorage, &Layout),
    sources: &[(&CudaStorage, &Layout)],
) -> Result<()> {
    let (device, place) = (out.device().clone(), range(layout)?);
    let Some(view) = out.as_cuda_slice_mut::<f32>()?.try_slice_mut(place) else {
        candle_core::bail!("{}: tensor does not fit its storage: {layout:?}", K::FILE)
    };
    call(kernel, &device, view, sources)
}

fn view<'a>(storage: &'a CudaStorage, place: Range<usize>) -> Result<View<'a>> {
    let view = match storage.dtype() {
        DType::U32 => storage.as_cuda_slice::<u32>()?.try_slice(place).map(View::Wholes),
        _ => storage.as_cuda_slice::<f32>()?.try_slice(place).map(View::Floats),
    };
    view.ok_or_else(|| candle_core::Error::Msg("tensor does not fit its storage".to_owned()))
}

fn call<K: Kernel>(
    kernel: &K,
    device: &CudaDevice,
    mut out: CudaViewMut<'_, f32>,
    sources: &[(&CudaStorage, &Layout)],
) -> Result<()> {
    let found = sources.iter().map(|(storage, layout)| (storage.dtype(), layout.shape().elem_count()));
    check(kernel, out.len(), &found.collect::<Vec<_>>())?;
    let Launch { function: name, grid, threads, shared_floats, scalars } = kernel.launch();
    if grid.contains(&0) {
        return Ok(());
    }
    let views = sources.iter().map(|(storage, layout)| view(storage, range(layout)?)).collect::<Result<Vec<_>>>()?;
    let function = device.get_or_load_custom_func(name, K::FILE, K::PTX)?;
    let shared_bytes = shared_floats * size_of::<f32>();
    if shared_bytes > SHARED_BYTES {
        let bytes = i32::try_from(shared_bytes).unwrap_or(i32::MAX);
        function.set_attribute(Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes).w()?;
    }
    let mut arguments = function.builder();
    arguments.arg(&mut out);
    for view in &views {
        match view {
            View::Floats(view) => arguments.arg(view),
            View::Wholes(view) => arguments.arg(view),
        };
    }
    for scalar in &scalars {
        match scalar {
            Scalar::Whole(number) => arguments.arg(number),
            Scalar::Float(number) => arguments.arg(number),
        };
    }
    let size = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let config = LaunchConfig {
        grid_dim: (size(grid[0]), size(grid[1]), size(grid[2])),
        block_dim: (size(threads), 1, 1),
        shared_mem_bytes: size(shared_bytes),
    };
    // SAFETY: the arguments are those of the function in their order, and the numbers that it reads and writes are as many
    // as it is told, which `check` has made sure of. What whole numbers point at was checked when the host listed them.
    unsafe { arguments.launch(config) }.w()?;
    Ok(())
}
