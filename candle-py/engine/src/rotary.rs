//! Rotary angles, computed once per position in f64 and kept as far as the longest sequence so far reaches.

use std::sync::{Arc, PoisonError, RwLock};

/// Cosines and sines by position, each `(positions, head_dim / 2)`.
#[derive(Debug, Default)]
pub struct Angles {
    /// Cosines.
    pub cos: Vec<f32>,
    /// Sines.
    pub sin: Vec<f32>,
}

/// The angles `position / theta^(2 i / head_dim)` of RoFormer (arXiv:2104.09864, equation 15).
#[derive(Debug)]
pub struct Rotary {
    theta: f64,
    head_dim: usize,
    known: RwLock<Arc<Angles>>,
}

impl Rotary {
    /// Angles with base `theta` for heads of `head_dim`; none is computed yet.
    pub fn new(theta: f64, head_dim: usize) -> Self {
        Self { theta, head_dim, known: RwLock::default() }
    }

    /// The angles of at least the first `positions` positions.
    pub fn upto(&self, positions: usize) -> Arc<Angles> {
        let wanted = positions * self.head_dim / 2;
        let known = Arc::clone(&self.known.read().unwrap_or_else(PoisonError::into_inner));
        if known.cos.len() >= wanted {
            return known;
        }
        let grown = Arc::new(self.compute(positions.next_power_of_two()));
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        if known.cos.len() < grown.cos.len() {
            *known = Arc::clone(&grown);
        }
        grown
    }

    fn compute(&self, positions: usize) -> Angles {
        let pairs = self.head_dim / 2;
        let frequencies: Vec<f64> =
            (0..pairs).map(|pair| self.theta.powf(-2.0 * pair as f64 / self.head_dim as f64)).collect();
        let angles = (0..positions).flat_map(|position| frequencies.iter().map(move |each| position as f64 * each));
        let (cos, sin) = angles.map(|angle| (angle.cos() as f32, angle.sin() as f32)).unzip();
        Angles { cos, sin }
    }
}
