//! What follows a product, in one pass over it: biases, an activation, the residual stream, the gate of a feed-forward.

use super::{Kernel, Launch, Scalar, Size, Source, in_file, whole};
use crate::cpu::{Activation, Isa, Kernels};

/// Numbers of a row that a block of threads has, one each.
const THREADS: usize = 256;

/// `x = activation(x + bias)`, in place.
#[derive(Clone, Copy, Debug)]
pub struct AddBias {
    pub rows: usize,
    pub width: usize,
    pub activation: Activation,
}

/// `x += bias + residual`.
#[derive(Clone, Copy, Debug)]
pub struct AddBiasAndResidual {
    pub rows: usize,
    pub width: usize,
}

/// `activation(first half of x) * second half of x`, for rows of twice `half`.
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    pub rows: usize,
    pub half: usize,
    pub activation: Activation,
}

fn number_of(activation: Activation) -> Scalar {
    whole(match activation {
        Activation::Identity => 0,
        Activation::Gelu => 1,
        Activation::GeluTanh => 2,
        Activation::Relu => 3,
        Activation::Silu => 4,
        Activation::Tanh => 5,
        Activation::Sigmoid => 6,
    })
}

fn launch(function: &'static str, rows: usize, width: usize, scalars: Vec<Scalar>) -> Launch {
    Launch { function, grid: [rows, width.div_ceil(THREADS), 1], threads: THREADS, shared_floats: 0, scalars }
}

/// The CPU's own kernels, which are tested for themselves.
fn kernels() -> Option<Kernels> {
    Kernels::new(Isa::detected())
}

impl Kernel for AddBias {
    in_file!("finish");

    fn out_len(&self) -> usize {
        self.rows * self.width
    }

    fn sources(&self) -> Vec<Size> {
        vec![Size::Floats(self.width)]
    }

    fn launch(&self) -> Launch {
        launch("add_bias", self.rows, self.width, vec![whole(self.width), number_of(self.activation)])
    }

    fn twin(&self, sources: &[Source<'_>], out: &mut [f32]) {
        for row in out.chunks_exact_mut(self.width) {
            row.iter_mut().zip(sources[0].floats()).for_each(|(value, bias)| *value += bias);
        }
        if let Some(kernels) = kernels() {
            kernels.activate(out, self.activation);
        }
    }
}

impl Kernel for AddBiasAndResidual {
    in_file!("finish");

    fn out_len(&self) -> usize {
        self.rows * self.width
    }

    fn sources(&self) -> Vec<Size> {
        vec![Size::Floats(self.width), Size::Floats(self.rows * self.width)]
    }

    fn launch(&self) -> Launch {
        launch("add_bias_and_residual", self.rows, self.width, vec![whole(self.width)])
    }

    fn twin(&self, sources: &[Source<'_>], out: &mut [f32]) {
        let residual = sources[1].floats().chunks_exact(self.width);
        for (row, residual) in out.chunks_exact_mut(self.width).zip(residual) {
            let both = sources[0].floats().iter().zip(residual);
            row.iter_mut().zip(both).for_each(|(value, (bias, residual))| *value += bias + residual);
        }
    }
}

impl Kernel for Gate {
    in_file!("finish");

    fn out_len(&self) -> usize {
        self.rows * self.half
    }

    fn sources(&self) -> Vec<Size> {
        vec![Size::Floats(2 * self.rows * self.half)]
    }

    fn launch(&self) -> Launch {
        launch("gate", self.rows, self.half, vec![whole(self.half), number_of(self.activation)])
    }

    fn twin(&self, sources: &[Source<'_>], out: &mut [f32]) {
        if let Some(kernels) = kernels() {
            kernels.gated(sources[0].floats(), self.rows, self.half, self.activation, out);
        }
    }
}
