//! A tensor summed over all ranks, where it is: in device memory by a group that knows it, else by way of the host.

use std::cell::RefCell;

use candle_core::{CpuStorage, CudaStorage, InplaceOp1, Layout, Tensor};

use super::range;
use crate::comm::Communicator;
use crate::error::{Error, Result};

/// The sum of float32 over all ranks, as a tensor of its own.
///
/// # Errors
/// Those of the group, and of the device.
pub fn sum_over_ranks(communicator: &dyn Communicator, tensor: &Tensor) -> Result<Tensor> {
    let sum = tensor.contiguous()?.copy()?; // others may hold the same memory
    let operation = Sum { communicator, failure: RefCell::default() };
    let done = sum.inplace_op1(&operation);
    match operation.failure.into_inner() {
        Some(failure) => {
            if communicator.on_device().is_some() {
                std::mem::forget(sum); // an operation that was given up may still write it
            }
            Err(failure)
        }
        None => done.map(|()| sum).map_err(Error::from),
    }
}

struct Sum<'a> {
    communicator: &'a dyn Communicator,
    /// The group's own error, which a tensor's cannot hold.
    failure: RefCell<Option<Error>>,
}

impl Sum<'_> {
    fn told(&self, result: Result<()>) -> candle_core::Result<()> {
        result.map_err(|failure| {
            let text = failure.to_string();
            self.failure.replace(Some(failure));
            candle_core::Error::Msg(text)
        })
    }
}

impl InplaceOp1 for Sum<'_> {
    fn name(&self) -> &'static str {
        "sum over ranks"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        let CpuStorage::F32(numbers) = storage else { candle_core::bail!("sum over ranks: not of float32") };
        self.told(self.communicator.all_reduce_sum(&mut numbers[range(layout)?]))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        use candle_core::backend::BackendStorage;
        use candle_core::cuda_backend::WrapErr;
        use candle_core::cuda_backend::cudarc::driver::DevicePtrMut;

        let place = range(layout)?;
        let stream = storage.device().cuda_stream();
        let slice = storage.as_cuda_slice_mut::<f32>()?;
        let Some(mut view) = slice.try_slice_mut(place) else {
            candle_core::bail!("sum over ranks: tensor does not fit its storage: {layout:?}")
        };
        if let Some(device) = self.communicator.on_device() {
            let count = view.len();
            let (address, _recorded) = view.device_ptr_mut(&stream);
            // SAFETY: the numbers of a tensor that nobody else has and that outlives a failure, and Candle's own stream of
            // the device's primary context.
            return self.told(unsafe { device.all_reduce_sum_at(address, count, stream.cu_stream() as u64) });
        }
        let mut numbers = stream.clone_dtoh(&view).w()?;
        self.told(self.communicator.all_reduce_sum(&mut numbers))?;
        stream.memcpy_htod(&numbers, &mut view).w()
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _storage: &mut CudaStorage, _layout: &Layout) -> candle_core::Result<()> {
        candle_core::bail!("sum over ranks: this build has no CUDA")
    }
}
