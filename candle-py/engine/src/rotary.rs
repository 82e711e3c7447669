//! Rotary angles, computed once per position in f64 and kept as far as the longest sequence so far reaches.

use std::f64::consts::TAU;
use std::sync::{Arc, PoisonError, RwLock};

/// Cosines and sines by position, each `(positions, head_dim / 2)`.
#[derive(Debug, Default)]
pub struct Angles {
    /// Cosines.
    pub cos: Vec<f32>,
    /// Sines.
    pub sin: Vec<f32>,
    /// Angles of a position: half of a head's width.
    pub pairs: usize,
}

/// The rotary embedding of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct RotaryConfig {
    /// The base of the frequencies.
    pub theta: f64,
    /// Width of a head, an even number.
    pub head_dim: usize,
    /// What is done to the frequencies for contexts longer than the model was first trained with.
    pub scaling: RotaryScaling,
}

/// How frequencies are stretched.
#[derive(Clone, Debug, PartialEq)]
pub enum RotaryScaling {
    /// Not at all.
    None,
    /// All alike.
    Linear {
        /// Frequencies are divided by this.
        factor: f64,
    },
    /// Llama 3.1's: low frequencies are divided, high ones left, those between blended.
    Llama3 {
        /// Low frequencies are divided by this.
        factor: f64,
        /// Waves longer than the first context over this are low.
        low_freq_factor: f64,
        /// Waves shorter than the first context over this are high.
        high_freq_factor: f64,
        /// Positions of the first training.
        original_positions: f64,
    },
    /// YaRN (arXiv:2309.00071).
    Yarn {
        /// Low frequencies are divided by this.
        factor: f64,
        /// Cosines and sines are multiplied by this.
        attention_factor: f64,
        /// Rotations within the first context from which on a frequency is left as it is.
        beta_fast: f64,
        /// Rotations up to which a frequency is divided whole.
        beta_slow: f64,
        /// Positions of the first training.
        original_positions: f64,
        /// Whether the ends of the ramp between are whole dimensions.
        truncate: bool,
    },
}

impl RotaryConfig {
    /// Angles with base `theta` for heads of `head_dim`, not stretched.
    pub fn plain(theta: f64, head_dim: usize) -> Self {
        Self { theta, head_dim, scaling: RotaryScaling::None }
    }

    /// Radians per position of each pair of dimensions: `theta^(-2 i / head_dim)` (RoFormer, arXiv:2104.09864, equation
    /// 15), stretched.
    pub fn frequencies(&self) -> Vec<f64> {
        let plain = |pair: usize| self.theta.powf(-2.0 * pair as f64 / self.head_dim as f64);
        (0..self.head_dim / 2).map(|pair| self.stretched(pair, plain(pair))).collect()
    }

    fn stretched(&self, pair: usize, frequency: f64) -> f64 {
        match self.scaling {
            RotaryScaling::None => frequency,
            RotaryScaling::Linear { factor } => frequency / factor,
            RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                let rotations = original_positions * frequency / TAU;
                if rotations < low_freq_factor {
                    return frequency / factor;
                }
                if rotations > high_freq_factor {
                    return frequency;
                }
                let kept = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                blend(frequency / factor, frequency, kept)
            }
            RotaryScaling::Yarn { factor, beta_fast, beta_slow, original_positions, truncate, .. } => {
                let (mut first, mut last) =
                    (self.dimension(beta_fast, original_positions), self.dimension(beta_slow, original_positions));
                if truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                let (first, mut last) = (first.max(0.0), last.min(self.head_dim as f64 - 1.0));
                if first == last {
                    last += 0.001;
                }
                let divided = ((pair as f64 - first) / (last - first)).clamp(0.0, 1.0);
                blend(frequency, frequency / factor, divided)
            }
        }
    }

    /// The pair of dimensions that turns so often within the first context (YaRN, section 3.2).
    fn dimension(&self, rotations: f64, original_positions: f64) -> f64 {
        self.head_dim as f64 * (original_positions / (rotations * TAU)).ln() / (2.0 * self.theta.ln())
    }

    /// What cosines and sines are multiplied by.
    fn magnitude(&self) -> f64 {
        match self.scaling {
            RotaryScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }
}

/// `from` to `to` as `part` goes from 0 to 1.
fn blend(from: f64, to: f64, part: f64) -> f64 {
    from * (1.0 - part) + to * part
}

/// The angles of one rotary embedding.
#[derive(Debug)]
pub struct Rotary {
    frequencies: Vec<f64>,
    magnitude: f64,
    known: RwLock<Arc<Angles>>,
}

impl Rotary {
    /// No angle is computed yet.
    pub fn new(config: &RotaryConfig) -> Self {
        Self { frequencies: config.frequencies(), magnitude: config.magnitude(), known: RwLock::default() }
    }

    /// The angles of at least the first `positions` positions.
    pub fn upto(&self, positions: usize) -> Arc<Angles> {
        let wanted = positions * self.frequencies.len();
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
        let angles =
            (0..positions).flat_map(|position| self.frequencies.iter().map(move |each| position as f64 * each));
        let number = |value: f64| (self.magnitude * value) as f32;
        let (cos, sin) = angles.map(|angle| (number(angle.cos()), number(angle.sin()))).unzip();
        Angles { cos, sin, pairs: self.frequencies.len() }
    }
}
