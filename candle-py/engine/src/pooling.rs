//! Pooling: the tokens of one sequence become one row, as sentence-transformers does it. Knows nothing of batches.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result};

/// How the tokens of a sequence become one row of the same width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolingMode {
    /// The first token that is pooled.
    Cls,
    /// The largest value of each feature.
    Max,
    /// The mean.
    Mean,
    /// The sum over the square root of the number of tokens.
    MeanSqrtLen,
    /// The mean with a token's position, from 1, as its weight.
    WeightedMean,
    /// The last token.
    Last,
}

impl PoolingMode {
    /// Every mode.
    pub const ALL: [PoolingMode; 6] = [
        PoolingMode::Cls,
        PoolingMode::Max,
        PoolingMode::Mean,
        PoolingMode::MeanSqrtLen,
        PoolingMode::WeightedMean,
        PoolingMode::Last,
    ];

    /// The engine's name of it.
    pub fn name(self) -> &'static str {
        match self {
            PoolingMode::Cls => "cls",
            PoolingMode::Max => "max",
            PoolingMode::Mean => "mean",
            PoolingMode::MeanSqrtLen => "mean_sqrt_len",
            PoolingMode::WeightedMean => "weighted_mean",
            PoolingMode::Last => "last",
        }
    }

    /// The mode that sentence-transformers' files call `name`.
    pub(crate) fn from_file_name(name: &str) -> Option<Self> {
        match name {
            "cls" => Some(PoolingMode::Cls),
            "max" => Some(PoolingMode::Max),
            "mean" => Some(PoolingMode::Mean),
            "mean_sqrt_len_tokens" => Some(PoolingMode::MeanSqrtLen),
            "weightedmean" => Some(PoolingMode::WeightedMean),
            "lasttoken" => Some(PoolingMode::Last),
            _ => None,
        }
    }
}

/// One mode or several, whose rows are joined in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pooling(Vec<PoolingMode>);

impl Pooling {
    /// The modes, of which there must be at least one.
    pub(crate) fn new(modes: Vec<PoolingMode>) -> Self {
        debug_assert!(!modes.is_empty());
        Self(modes)
    }

    /// The modes in order.
    pub fn modes(&self) -> &[PoolingMode] {
        &self.0
    }

    /// Width of a pooled row.
    pub fn width(&self, hidden_size: usize) -> usize {
        self.0.len() * hidden_size
    }

    /// Pools one sequence: `tokens` is `(length, width)`, of which the first `skip` rows are left out; `out` is
    /// `width * modes` wide. Sums are in f64, so their rounding depends on nothing but the sequence.
    ///
    /// With every token left out, what sentence-transformers gives is given: the first token (cls), zeros (the means
    /// and last), minus infinity (max).
    pub(crate) fn apply(&self, tokens: &[f32], width: usize, skip: usize, out: &mut [f32]) {
        let length = tokens.len() / width;
        let skip = skip.min(length);
        let kept = &tokens[skip * width..];
        for (mode, out) in self.0.iter().zip(out.chunks_exact_mut(width)) {
            match mode {
                PoolingMode::Cls => {
                    out.copy_from_slice(if kept.is_empty() { &tokens[..width] } else { &kept[..width] })
                }
                PoolingMode::Last if kept.is_empty() => out.fill(0.0),
                PoolingMode::Last => out.copy_from_slice(&kept[kept.len() - width..]),
                PoolingMode::Max => {
                    out.fill(f32::NEG_INFINITY);
                    for row in kept.chunks_exact(width) {
                        // Unlike `f32::max`, this lets a NaN through.
                        out.iter_mut()
                            .zip(row)
                            .filter(|(best, value)| **value > **best || value.is_nan())
                            .for_each(|(best, value)| *best = *value);
                    }
                }
                PoolingMode::Mean => weighted_sum(kept, width, |_| 1.0, |weight| weight, out),
                PoolingMode::MeanSqrtLen => weighted_sum(kept, width, |_| 1.0, f64::sqrt, out),
                PoolingMode::WeightedMean => {
                    weighted_sum(kept, width, |row| (skip + row + 1) as f64, |weight| weight, out);
                }
            }
        }
    }
}

/// The weighted sum of rows over `divisor(sum of weights)`.
fn weighted_sum(
    rows: &[f32],
    width: usize,
    weight: impl Fn(usize) -> f64,
    divisor: impl Fn(f64) -> f64,
    out: &mut [f32],
) {
    const LEAST: f64 = 1e-9;
    const LANES: usize = 64;
    let count = rows.len() / width;
    let total: f64 = (0..count).map(&weight).sum();
    let divisor = divisor(total.max(LEAST));
    for (first, out) in (0..width).step_by(LANES).zip(out.chunks_mut(LANES)) {
        let mut sums = [0.0_f64; LANES];
        for (index, row) in rows.chunks_exact(width).enumerate() {
            let weight = weight(index);
            let values = &row[first..first + out.len()];
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight * f64::from(*value));
        }
        out.iter_mut().zip(sums).for_each(|(out, sum)| *out = (sum / divisor) as f32);
    }
}

impl FromStr for Pooling {
    type Err = Error;

    /// Reads a mode, or modes joined by "+".
    fn from_str(text: &str) -> Result<Self> {
        let mode = |name: &str| PoolingMode::ALL.into_iter().find(|mode| mode.name() == name);
        let modes: Option<Vec<PoolingMode>> = text.split('+').map(mode).collect();
        modes.map(Self).ok_or_else(|| {
            let names = PoolingMode::ALL.map(PoolingMode::name).join(", ");
            Error::input(format!("pooling is not known: `{text}`"))
                .with_hint(format!("auto, or of these, joined by +: {names}"))
        })
    }
}

impl fmt::Display for Pooling {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.0.iter().map(|mode| mode.name()).collect();
        formatter.write_str(&names.join("+"))
    }
}
