//! The rotary embedding that a decoder's `config.json` asks for: `rope_parameters`, or the older `rope_theta` and
//! `rope_scaling`.

use serde_json::{Map, Value};

use super::JsonObject;
use crate::error::Problems;
use crate::rotary::{RotaryConfig, RotaryScaling};

/// The rotary kinds, as told in messages.
const KINDS: &str = "default, linear, llama3, yarn";

/// Reads the rotary embedding of heads `head_dim` wide.
pub(super) fn read_rotary(
    file: &JsonObject,
    head_dim: usize,
    max_positions: usize,
    problems: &mut Problems,
) -> RotaryConfig {
    const DEFAULT_THETA: f64 = 10_000.0;
    refuse_partial(file, problems);
    let parameters = parameters(file, problems);
    refuse_partial(&parameters, problems);
    let theta = file.positive("rope_theta", DEFAULT_THETA, problems);
    let theta = parameters.positive("rope_theta", theta, problems);
    let scaling = read_scaling(&parameters, max_positions, problems);
    RotaryConfig { theta, head_dim, scaling }
}

/// The object that holds the rotary settings; empty when there is none.
fn parameters(file: &JsonObject, problems: &mut Problems) -> JsonObject {
    let keys = ["rope_parameters", "rope_scaling"];
    let mut given = keys.into_iter().filter_map(|key| file.get(key).map(|value| (key, value)));
    let nothing = || JsonObject::nested(file.path(), &Map::new());
    let Some((key, value)) = given.next() else { return nothing() };
    if given.next().is_some_and(|(_, other)| other != value) {
        problems.push(file.complaint("rope_scaling", "is not what rope_parameters says"));
    }
    match value {
        Value::Object(values) => JsonObject::nested(file.path(), values),
        _ => {
            problems.push(file.complaint(key, "must be an object"));
            nothing()
        }
    }
}

fn read_scaling(parameters: &JsonObject, max_positions: usize, problems: &mut Problems) -> RotaryScaling {
    let key = if parameters.get("rope_type").is_some() { "rope_type" } else { "type" };
    let kind = parameters.text(key, "default", problems);
    if key == "rope_type" && parameters.text("type", kind, problems) != kind {
        problems.push(parameters.complaint("type", "is not what rope_type says"));
    }
    let needed = |key: &str, problems: &mut Problems| {
        if parameters.get(key).is_none() {
            problems.push(parameters.complaint(key, &format!("is needed for the rotary kind {kind}")));
        }
        parameters.positive(key, 1.0, problems)
    };
    let original = |problems: &mut Problems| {
        parameters.positive("original_max_position_embeddings", max_positions as f64, problems)
    };
    let (scaling, own): (_, &[&str]) = match kind {
        "default" => (RotaryScaling::None, &[]),
        "linear" => (RotaryScaling::Linear { factor: needed("factor", problems) }, &["factor"]),
        "llama3" => {
            let scaling = RotaryScaling::Llama3 {
                factor: needed("factor", problems),
                low_freq_factor: needed("low_freq_factor", problems),
                high_freq_factor: needed("high_freq_factor", problems),
                original_positions: original(problems),
            };
            (scaling, &["factor", "low_freq_factor", "high_freq_factor"])
        }
        "yarn" => (
            read_yarn(parameters, original(problems), max_positions, problems),
            &["factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"],
        ),
        _ => {
            problems.push(parameters.complaint(key, &format!("is not a supported rotary kind ({KINDS})")));
            return RotaryScaling::None;
        }
    };
    // "finetuned" tells of the training alone.
    const COMMON: [&str; 6] =
        ["rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings", "finetuned"];
    let unknown = |key: &&str| !COMMON.contains(key) && !own.contains(key) && parameters.get(key).is_some();
    for key in parameters.keys().filter(unknown) {
        problems.push(parameters.complaint(key, &format!("is not supported in the rotary kind {kind}")));
    }
    scaling
}

/// YaRN's settings; without `attention_factor` it is `0.1 ln(factor) + 1` (arXiv:2309.00071, equation 22), or the ratio
/// of two such numbers where both `mscale` and `mscale_all_dim` are there.
fn read_yarn(
    parameters: &JsonObject,
    original_positions: f64,
    max_positions: usize,
    problems: &mut Problems,
) -> RotaryScaling {
    let factor = parameters.positive("factor", max_positions as f64 / original_positions, problems);
    let magnitude = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let mut scale = |key: &str| parameters.number(key, 0.0, problems);
    let (one, all) = (scale("mscale"), scale("mscale_all_dim"));
    let attention_factor = match one != 0.0 && all != 0.0 {
        true => magnitude(one) / magnitude(all),
        false => magnitude(1.0),
    };
    RotaryScaling::Yarn {
        factor,
        attention_factor: parameters.positive("attention_factor", attention_factor, problems),
        beta_fast: parameters.positive("beta_fast", 32.0, problems),
        beta_slow: parameters.positive("beta_slow", 1.0, problems),
        original_positions,
        truncate: parameters.flag("truncate", true, problems),
    }
}

/// Notes a head of which only a part is rotated.
fn refuse_partial(file: &JsonObject, problems: &mut Problems) {
    if file.positive("partial_rotary_factor", 1.0, problems) != 1.0 {
        problems.push(file.complaint("partial_rotary_factor", "is not supported"));
    }
}
