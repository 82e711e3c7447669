//! CPU kernels: the arithmetic of a forward over ragged `(tokens, hidden)` float32 rows. Knows nothing of models,
//! weights files, threads or batches; every call runs on the calling thread.
//!
//! For one `Isa` a row's result depends on that row alone (attention: on its sequence alone), bit for bit, whatever the
//! number of rows or the row's place among them. Sizes that do not fit are caller mistakes and panic.

mod activation;
#[cfg(target_arch = "x86_64")]
mod amx;
mod amx_linear;
mod amx_pack;
mod attention;
mod attention_paged;
mod attention_panel;
mod attention_powers;
mod attention_values;
mod int8_linear;
mod int8_pack;
mod int8_rows;
mod isa;
mod linear;
mod math;
mod norm;
mod pack;
mod pages;
mod reduce;
mod rotary;
mod simd;
#[cfg(target_arch = "x86_64")]
mod simd_avx2;
#[cfg(target_arch = "x86_64")]
mod simd_avx512;
mod simd_scalar;
#[cfg(test)]
mod tests;
mod tile;
mod tiles;
mod tiles_soft;

#[cfg(target_arch = "x86_64")]
pub(crate) use amx::TileFeatures;

pub use activation::Activation;
pub use attention::AttentionArgs;
pub use attention_paged::PagedAttentionArgs;
pub use int8_rows::{QuantizedPart, QuantizedRows};
pub use isa::{BytePath, Isa};
pub use linear::Epilogue;
pub use pack::{PackedMatrix, Storage, bfloat16_bits};
pub use pages::{PAGE_TOKENS, PageNumbers, PageShape, Pages, PagesView, SharedPages};
pub(crate) use reduce::LEAST_EXPONENT;

use std::ops::Range;

use simd::{dispatch, dispatch_bytes};

/// The rows of a product.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// In float32.
    Rows(&'a [f32]),
    /// As `Kernels::quantize` made them, for a weight in int8.
    Quantized(&'a QuantizedRows),
}

/// The kernels of one instruction set.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    isa: Isa,
    bytes: BytePath,
}

impl Kernels {
    /// The kernels of `isa`, or `None` when this processor lacks it.
    pub fn new(isa: Isa) -> Option<Kernels> {
        isa.available().then(|| Kernels { isa, bytes: BytePath::of(isa) })
    }

    /// The instruction set in force.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Packs a weight `(n, k)`, row-major as torch's Linear stores it.
    pub fn pack(&self, weight: &[f32], n: usize, k: usize, storage: Storage) -> PackedMatrix {
        assert_eq!(weight.len(), n * k, "weight is not n * k");
        if self.isa.has_tiles() && storage == Storage::Bfloat16 {
            return amx_pack::pack(weight, n, k, self.isa);
        }
        if storage == Storage::Int8 {
            return dispatch_bytes(self.bytes, int8_pack::PackBytes { weight, n, k, isa: self.isa, bytes: self.bytes });
        }
        dispatch(self.isa, pack::Pack { weight, n, k, isa: self.isa, storage })
    }

    /// `out(rows, n) = epilogue(x(rows, k) @ weight^T + bias)`; `out` rows are `out_stride >= n` apart.
    #[allow(clippy::too_many_arguments)]
    pub fn linear(
        &self,
        x: &[f32],
        rows: usize,
        w: &PackedMatrix,
        bias: Option<&[f32]>,
        epilogue: Epilogue<'_>,
        out: &mut [f32],
        out_stride: usize,
    ) {
        assert_rows(out.len(), rows, w.n(), out_stride);
        let x = Operand::Rows(x);
        // SAFETY: the buffer holds all rows.
        unsafe { self.linear_panels(x, rows, w, bias, epilogue, out.as_mut_ptr(), out_stride, 0..w.panel_count()) };
    }

    /// The part of `linear` that some of the weight's panels give, each panel a range of columns of its own: calls for
    /// different panels may write into one buffer at the same time.
    ///
    /// # Safety
    /// `out` is readable and writable for the panels' columns of `rows` rows, `out_stride` apart, and nobody else reads
    /// or writes these columns meanwhile.
    #[allow(clippy::too_many_arguments)]
    pub unsafe fn linear_panels(
        &self,
        x: Operand<'_>,
        rows: usize,
        w: &PackedMatrix,
        bias: Option<&[f32]>,
        epilogue: Epilogue<'_>,
        out: *mut f32,
        out_stride: usize,
        panels: Range<usize>,
    ) {
        assert_eq!(w.isa, self.isa, "weight packed for another instruction set");
        assert!(w.bytes.is_none_or(|bytes| bytes == self.bytes), "bytes packed for other instructions");
        let (x, quantized) = match x {
            Operand::Rows(x) => {
                assert_eq!(x.len(), rows * w.k(), "x is not rows * k");
                (x, None)
            }
            Operand::Quantized(x) => {
                assert_eq!((x.shape(), w.storage), ((rows, w.k()), Storage::Int8), "x is not rows * k bytes");
                (&[][..], Some(x))
            }
        };
        assert!(bias.is_none_or(|bias| bias.len() == w.n()), "bias is not n");
        assert!(panels.end <= w.panel_count(), "no such panel");
        assert!(out_stride >= w.n(), "row stride is less than the row");
        if let Epilogue::Add(residual, stride) = epilogue {
            assert_rows(residual.len(), rows, w.n(), stride);
        }
        let linear = linear::Linear { x, quantized, rows, weight: w, bias, epilogue, out, out_stride, panels };
        match w.storage {
            Storage::Bfloat16 if self.isa.has_tiles() => {
                dispatch(self.isa, amx_linear::TiledLinear { linear, isa: self.isa })
            }
            Storage::Int8 => dispatch_bytes(self.bytes, int8_linear::ByteLinear { linear }),
            _ => dispatch(self.isa, linear),
        }
    }

    /// Quantises a part of rows for products with a weight in int8: the same numbers as those make of float32 rows.
    pub fn quantize(&self, x: &[f32], to: QuantizedPart<'_>) {
        dispatch_bytes(self.bytes, int8_rows::Quantize { x, to });
    }

    /// Layer normalisation in place over rows of `dim`, then `* weight (+ bias)`; two-pass variance.
    pub fn layer_norm(&self, x: &mut [f32], dim: usize, weight: &[f32], bias: Option<&[f32]>, eps: f32) {
        assert!(dim > 0 && x.len().is_multiple_of(dim), "x is not whole rows");
        assert!(weight.len() == dim && bias.is_none_or(|bias| bias.len() == dim), "weight or bias is not dim");
        dispatch(self.isa, norm::LayerNorm { x, dim, weight, bias, eps });
    }

    /// Root-mean-square normalisation in place over rows of `dim`, then `* weight`.
    pub fn rms_norm(&self, x: &mut [f32], dim: usize, weight: &[f32], eps: f32) {
        assert!(dim > 0 && x.len().is_multiple_of(dim), "x is not whole rows");
        assert_eq!(weight.len(), dim, "weight is not dim");
        dispatch(self.isa, norm::RmsNorm { x, dim, weight, eps });
    }

    /// Applies `activation` in place.
    pub fn activate(&self, x: &mut [f32], activation: Activation) {
        dispatch(self.isa, activation::Activate { x, activation });
    }

    /// `out(rows, half) = activation(x[:, :half]) * x[:, half:]` for `x(rows, 2 * half)`.
    pub fn gated(&self, x: &[f32], rows: usize, half: usize, activation: Activation, out: &mut [f32]) {
        assert_eq!(x.len(), rows * half * 2, "x is not rows * 2 * half");
        assert_eq!(out.len(), rows * half, "out is not rows * half");
        dispatch(self.isa, activation::Gated { x, half, activation, out });
    }

    /// Attention of one sequence (see `AttentionArgs`); `out(q_len, heads * head_dim)` rows are `out_stride` apart.
    /// `scratch` keeps its allocation between calls. A row that may look at no key becomes zero.
    pub fn attention(&self, args: &AttentionArgs<'_>, scratch: &mut Vec<f32>, out: &mut [f32]) {
        args.check(out.len());
        dispatch(self.isa, attention::Attention { args, scratch, out });
    }

    /// Writes one token's keys and values, `(kv_heads, head_dim)` each, into a page.
    pub fn write_token(&self, shape: PageShape, page: &mut [u8], token: usize, keys: &[f32], values: &[f32]) {
        assert!(token < PAGE_TOKENS, "token is outside the page");
        assert_eq!(page.len(), shape.bytes(), "page is not of this shape");
        assert!([keys, values].iter().all(|row| row.len() == shape.kv_heads * shape.head_dim), "not the heads' width");
        dispatch(self.isa, pages::WriteToken { shape, page, token, keys, values });
    }

    /// Causal attention of one sequence's newest tokens to keys and values in pages (see `PagedAttentionArgs`).
    /// `scratch` keeps its allocation between calls.
    pub fn paged_attention(&self, args: &PagedAttentionArgs<'_>, scratch: &mut Vec<f32>, out: &mut [f32]) {
        args.check(out.len());
        dispatch(self.isa, attention_paged::PagedAttention { args, scratch, out });
    }

    /// Rotary embedding in place, half-split ("neox") form: `x` has `rows` of `heads * head_dim`, `stride` apart;
    /// `cos` and `sin` are `(rows, head_dim / 2)`.
    #[allow(clippy::too_many_arguments)]
    pub fn rotary(
        &self,
        x: &mut [f32],
        stride: usize,
        rows: usize,
        heads: usize,
        head_dim: usize,
        cos: &[f32],
        sin: &[f32],
    ) {
        assert!(head_dim.is_multiple_of(2), "head_dim is odd");
        assert_rows(x.len(), rows, heads * head_dim, stride);
        assert!(cos.len() == rows * head_dim / 2 && sin.len() == cos.len(), "tables are not rows * head_dim / 2");
        dispatch(self.isa, rotary::Rotary { x, stride, rows, heads, head_dim, cos, sin });
    }

    /// Softmax of one row in place.
    pub fn softmax(&self, row: &mut [f32]) {
        dispatch(self.isa, reduce::Softmax { row });
    }

    /// The greatest number of a row, minus infinity when it is empty; NaNs are passed over.
    pub fn greatest(&self, row: &[f32]) -> f32 {
        dispatch(self.isa, reduce::Greatest { row })
    }

    /// `row = exp(row * factor)` in place for numbers that are not above 0, and the sum of that.
    pub fn exponentials(&self, row: &mut [f32], factor: f32) -> f32 {
        dispatch(self.isa, reduce::Exponentials { row, factor })
    }

    /// The sum of `exp(number - greatest)` over the row, none of whose numbers is above `greatest`; what is below the 10^-36th
    /// part of the greatest counts as 0. NaN where one is NaN.
    pub fn power_sum(&self, row: &[f32], greatest: f32) -> f32 {
        dispatch(self.isa, reduce::PowerSum { row, greatest })
    }

    /// The logarithm of the sum of the row's exponentials.
    pub fn log_sum_exp(&self, row: &[f32]) -> f32 {
        dispatch(self.isa, reduce::LogSumExp { row })
    }

    /// Divides the row by its Euclidean norm (at least 1e-12, as torch's `normalize`); a zero row stays zero.
    pub fn l2_normalize(&self, row: &mut [f32]) {
        dispatch(self.isa, reduce::L2Normalize { row });
    }

    /// Inner product.
    pub fn dot(&self, a: &[f32], b: &[f32]) -> f32 {
        assert_eq!(a.len(), b.len(), "lengths differ");
        dispatch(self.isa, reduce::Dot { a, b })
    }
}

/// Asserts that a buffer of `len` holds `rows` rows of `width`, `stride` apart.
fn assert_rows(len: usize, rows: usize, width: usize, stride: usize) {
    assert!(stride >= width, "row stride is less than the row");
    assert!(rows == 0 || len >= (rows - 1) * stride + width, "buffer is shorter than its rows");
}
