//! Products of matrices in halves whose sums stay float32 to the end: Candle's own round them to halves, logits included.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Shape, Tensor};

use super::{Result, range};

/// `x @ weight^T` in float32, for `x` of `(rows, in_features)` and a weight of `(out_features, in_features)`, both of one
/// half dtype and contiguous.
pub fn half_product(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let ((m, k), (n, of_weight)) = (x.dims2()?, weight.dims2()?);
    if k != of_weight || m * n * k == 0 || x.dtype() != weight.dtype() {
        candle_core::bail!("half product: no product of {:?} and {:?}", x.layout(), weight.layout());
    }
    x.apply_op2_no_bwd(weight, &HalfProduct { m, n, k })
}

struct HalfProduct {
    m: usize,
    n: usize,
    k: usize,
}

/// The numbers of a storage of halves as f32, which holds them exactly.
fn widened(storage: &CpuStorage, layout: &Layout) -> Result<Vec<f32>> {
    let range = range(layout)?;
    match storage {
        CpuStorage::BF16(numbers) => Ok(numbers[range].iter().map(|number| number.to_f32()).collect()),
        CpuStorage::F16(numbers) => Ok(numbers[range].iter().map(|number| number.to_f32()).collect()),
        _ => candle_core::bail!("half product: not of halves: {:?}", storage.dtype()),
    }
}

impl CustomOp2 for HalfProduct {
    fn name(&self) -> &'static str {
        "half product"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        of_x: &Layout,
        weight: &CpuStorage,
        of_weight: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, weight) = (widened(x, of_x)?, widened(weight, of_weight)?);
        let dot = |x: &[f32], row: &[f32]| x.iter().zip(row).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum::<f64>();
        let rows = x.chunks_exact(self.k);
        let out = rows.flat_map(|x| weight.chunks_exact(self.k).map(move |row| dot(x, row) as f32)).collect();
        Ok((CpuStorage::F32(out), Shape::from((self.m, self.n))))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        candle_core::bail!("this build has no CUDA support")
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        of_x: &Layout,
        weight: &CudaStorage,
        of_weight: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        use candle_core::cuda_backend::CudaStorageSlice::{BF16, F16};
        use candle_core::cuda_backend::cudarc::cublas::sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_16F};

        let (of_x, of_weight) = (range(of_x)?, range(of_weight)?);
        let out = match (&x.slice, &weight.slice) {
            (BF16(left), BF16(right)) => {
                self.on_device(x.device(), left.try_slice(of_x), right.try_slice(of_weight), CUDA_R_16BF)
            }
            (F16(left), F16(right)) => {
                self.on_device(x.device(), left.try_slice(of_x), right.try_slice(of_weight), CUDA_R_16F)
            }
            _ => candle_core::bail!("half product: not of halves: {:?} {:?}", x.dtype(), weight.dtype()),
        };
        Ok((out?, Shape::from((self.m, self.n))))
    }
}

#[cfg(feature = "cuda")]
impl HalfProduct {
    /// The product by cuBLAS, which has matrices by columns: to it, the weight is its transpose, `x` and the output are
    /// theirs, and `out^T = weight @ x^T`.
    fn on_device<T>(
        &self,
        device: &candle_core::CudaDevice,
        x: Option<candle_core::cuda_backend::cudarc::driver::CudaView<'_, T>>,
        weight: Option<candle_core::cuda_backend::cudarc::driver::CudaView<'_, T>>,
        dtype: candle_core::cuda_backend::cudarc::cublas::sys::cudaDataType_t,
    ) -> Result<CudaStorage> {
        use std::ffi::c_int;

        use candle_core::cuda_backend::WrapErr;
        use candle_core::cuda_backend::cudarc::cublas::{result, sys};
        use candle_core::cuda_backend::cudarc::driver::{DevicePtr, DevicePtrMut};
        use sys::cublasOperation_t::{CUBLAS_OP_N, CUBLAS_OP_T};

        let size = |number: usize| {
            c_int::try_from(number).map_err(|_| candle_core::Error::Msg(format!("half product: too large: {number}")))
        };
        let (m, n, k) = (size(self.m)?, size(self.n)?, size(self.k)?);
        let (Some(x), Some(weight)) = (x, weight) else {
            candle_core::bail!("half product: tensor does not fit its storage")
        };
        let (stream, blas) = (device.cuda_stream(), device.cublas_handle());
        // SAFETY: the product writes all of it.
        let mut out = unsafe { device.alloc::<f32>(self.m * self.n)? };
        {
            let (x, _x_is_read) = x.device_ptr(&stream);
            let (weight, _weight_is_read) = weight.device_ptr(&stream);
            let (out, _out_is_written) = out.device_ptr_mut(&stream);
            let (one, zero) = (1.0_f32, 0.0_f32);
            // SAFETY: the three matrices lie in device memory without gaps and are of the sizes that are told: views and
            // output were cut to them. Factors are float32, as the type of the sums asks for, and outlive the call.
            unsafe {
                result::gemm_ex(
                    *blas.handle(),
                    CUBLAS_OP_T,
                    CUBLAS_OP_N,
                    n,
                    m,
                    k,
                    (&raw const one).cast(),
                    weight as *const _,
                    dtype,
                    k,
                    x as *const _,
                    dtype,
                    k,
                    (&raw const zero).cast(),
                    out as *mut _,
                    sys::cudaDataType_t::CUDA_R_32F,
                    n,
                    sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                    sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
                )
            }
            .w()?;
        }
        Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
    }
}
