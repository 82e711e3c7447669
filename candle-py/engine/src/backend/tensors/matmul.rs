//! The one matrix product of the tensor backend.

use candle_core::{DType, Tensor};

use crate::cuda::half_product;
use crate::error::{Error, Result};

/// `x @ weight^T` in float32, for float32 `x` of `(rows, in_features)` and a weight of `(out_features, in_features)` in any
/// dtype: `x` is rounded to that, sums are float32.
///
/// # Errors
/// Operands that CUDA would refuse, on every device, so that the CPU finds them first; the device's.
pub fn by_transposed(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let x = x.to_dtype(weight.dtype())?;
    let transposed = weight.t()?;
    check(&x, &transposed)?;
    Ok(match weight.dtype() {
        DType::F32 => x.matmul(&transposed)?,
        _ => half_product(&x, weight)?,
    })
}

/// Checks that both matrices lie as cuBLAS takes them: rows or columns without gaps.
fn check(left: &Tensor, right: &Tensor) -> Result<()> {
    let (m, k) = left.dims2()?;
    let (rows, n) = right.dims2()?;
    let dense = |tensor: &Tensor, rows: usize, columns: usize| {
        let [down, across] = *tensor.stride() else { return false };
        let by_rows = (across == 1 || columns == 1) && (down == columns || rows == 1);
        let by_columns = (across == rows || columns == 1) && (down == 1 || rows == 1);
        by_rows || by_columns
    };
    if rows != k || m == 0 || n == 0 || k == 0 || !dense(left, m, k) || !dense(right, k, n) {
        let (left, right) = (left.layout(), right.layout());
        return Err(Error::internal(format!("matrices do not lie as a product takes them: `{left:?} {right:?}`")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::{by_transposed, check};

    fn matrix(rows: usize, columns: usize) -> Tensor {
        let numbers = (0..rows * columns).map(|number| number as f32).collect();
        Tensor::from_vec::<_, f32>(numbers, (rows, columns), &Device::Cpu).unwrap()
    }

    #[test]
    fn products_are_those_of_the_transposed_weight() {
        let found = by_transposed(&matrix(2, 3), &matrix(2, 3)).unwrap();
        assert_eq!(found.to_vec2::<f32>().unwrap(), [[5.0, 14.0], [14.0, 50.0]]);
    }

    #[test]
    fn halves_are_summed_in_float32() {
        for dtype in [DType::BF16, DType::F16] {
            // 1 + 2^-5 is a half of either kind; of its square, and of sums of that, neither holds the last digit.
            let number = Tensor::full(1.03125_f32, (2, 3), &Device::Cpu).unwrap();
            let found = by_transposed(&number, &number.to_dtype(dtype).unwrap()).unwrap();
            assert_eq!(found.to_vec2::<f32>().unwrap(), [[3.190_429_7; 2]; 2]);
        }
    }

    #[test]
    fn matrices_that_cuda_would_refuse_are_refused_everywhere() {
        let wide = matrix(4, 6);
        let columns = wide.narrow(1, 0, 3).unwrap();
        let every_second = matrix(8, 3).reshape((4, 2, 3)).unwrap().narrow(1, 0, 1).unwrap().squeeze(1).unwrap();
        for bad in [&columns, &every_second] {
            // Candle's CPU takes them.
            assert!(bad.matmul(&matrix(3, 2)).is_ok());
            assert!(by_transposed(bad, &matrix(2, 3)).is_err());
            assert!(by_transposed(&matrix(2, 3), bad).is_err());
        }
        for good in [wide.narrow(0, 1, 2).unwrap(), matrix(6, 4).t().unwrap(), matrix(1, 6)] {
            assert!(check(&good, &matrix(6, 5)).is_ok());
            assert!(check(&good, &matrix(5, 6).t().unwrap()).is_ok());
        }
        assert!(check(&wide, &matrix(5, 5)).is_err());
    }
}
