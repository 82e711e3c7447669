//! The labels of a sequence classifier, from `id2label`, `num_labels` and `problem_type`.

use super::JsonObject;
use crate::error::Problems;

/// More labels than this are damage.
const MAX_LABELS: usize = 1 << 20;

/// A classifier's labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labels {
    /// One name per logit, in order.
    pub names: Vec<String>,
    /// "regression", "single_label_classification" or "multi_label_classification", if the file says.
    pub problem_type: Option<String>,
}

impl Labels {
    /// Reads the labels; without `id2label` they are `LABEL_0` and on, `num_labels` or else two of them.
    pub(super) fn read(file: &JsonObject, problems: &mut Problems) -> Self {
        let count = file.size("num_labels", 2, 1, MAX_LABELS, problems);
        let names = match file.get("id2label") {
            None => (0..count).map(|id| format!("LABEL_{id}")).collect(),
            Some(value) => match value.as_object().and_then(names_by_id) {
                Some(names) if file.get("num_labels").is_none() || names.len() == count => names,
                Some(_) => {
                    problems.push(file.complaint("num_labels", "is not the number of names in id2label"));
                    Vec::new()
                }
                None => {
                    problems.push(file.complaint("id2label", "must map each id from 0 on to a name"));
                    Vec::new()
                }
            },
        };
        Self { names, problem_type: problem_type(file, problems) }
    }
}

/// The names in the order of their ids, which must be 0, 1, 2 and on.
fn names_by_id(map: &serde_json::Map<String, serde_json::Value>) -> Option<Vec<String>> {
    let mut names = vec![None; map.len()];
    for (id, name) in map {
        let slot = names.get_mut(id.parse::<usize>().ok()?)?;
        *slot = Some(match name {
            serde_json::Value::String(name) => name.clone(),
            other => other.to_string(),
        });
    }
    names.into_iter().collect::<Option<Vec<_>>>().filter(|names| !names.is_empty())
}

fn problem_type(file: &JsonObject, problems: &mut Problems) -> Option<String> {
    const KNOWN: [&str; 3] = ["regression", "single_label_classification", "multi_label_classification"];
    file.get("problem_type")?;
    let name = file.text("problem_type", "", problems);
    if !KNOWN.contains(&name) {
        problems.push(file.complaint("problem_type", "is not supported"));
        return None;
    }
    Some(name.to_owned())
}
