//! Reading of JSON files whose keys are checked one by one, with all problems gathered. Knows no model.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Error, Problems, Result};

/// A larger configuration file is refused unread.
const MAX_SIZE_BYTES: u64 = 64 << 20;

/// Reads a JSON file.
pub fn read_json(path: &Path) -> Result<Value> {
    let size_bytes = fs::metadata(path).map_err(|error| Error::file(path, unreadable(&error)))?.len();
    if size_bytes > MAX_SIZE_BYTES {
        return Err(Error::file(path, format!("file of {size_bytes} bytes is too large for a configuration")));
    }
    let text = fs::read(path).map_err(|error| Error::file(path, unreadable(&error)))?;
    serde_json::from_slice(&text).map_err(|error| Error::file(path, format!("file is not valid JSON ({error})")))
}

fn unreadable(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "file is missing".to_owned(),
        _ => format!("file cannot be read ({error})"),
    }
}

/// A JSON object whose values are asked for by key and kind; what does not fit is noted and a default stands in.
#[derive(Debug)]
pub struct JsonObject {
    path: PathBuf,
    values: Map<String, Value>,
}

impl JsonObject {
    /// Reads a file that holds one object.
    pub fn read(path: &Path) -> Result<Self> {
        match read_json(path)? {
            Value::Object(values) => Ok(Self { path: path.to_owned(), values }),
            _ => Err(Error::file(path, "file does not hold a JSON object")),
        }
    }

    /// The object `value`, which is part of the file at `path`.
    pub fn nested(path: &Path, values: &Map<String, Value>) -> Self {
        Self { path: path.to_owned(), values: values.clone() }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All keys, in the file's order of names.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.values.keys().map(String::as_str)
    }

    /// The value; a JSON null counts as absent.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key).filter(|value| !value.is_null())
    }

    /// Whether the key is there, be it with null.
    pub fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// A clause about one key, its value last in backticks.
    pub fn complaint(&self, key: &str, what: &str) -> String {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        let value = self.values.get(key).map_or_else(|| "absent".to_owned(), shortened);
        format!("{name}: {key} {what}: `{value}`")
    }

    /// A whole number between `least` and `most`.
    pub fn size(&self, key: &str, default: usize, least: usize, most: usize, problems: &mut Problems) -> usize {
        match self.get(key) {
            None => default,
            Some(value) => match value.as_u64().and_then(|value| usize::try_from(value).ok()) {
                Some(value) if (least..=most).contains(&value) => value,
                _ => {
                    problems.push(self.complaint(key, &format!("must be a whole number from {least} to {most}")));
                    default
                }
            },
        }
    }

    /// A positive, finite number.
    pub fn positive(&self, key: &str, default: f64, problems: &mut Problems) -> f64 {
        match self.get(key) {
            None => default,
            Some(value) => match value.as_f64() {
                Some(value) if value.is_finite() && value > 0.0 => value,
                _ => {
                    problems.push(self.complaint(key, "must be a positive number"));
                    default
                }
            },
        }
    }

    /// A finite number.
    pub fn number(&self, key: &str, default: f64, problems: &mut Problems) -> f64 {
        match self.get(key) {
            None => default,
            Some(value) => value.as_f64().unwrap_or_else(|| {
                problems.push(self.complaint(key, "must be a number"));
                default
            }),
        }
    }

    /// A truth value.
    pub fn flag(&self, key: &str, default: bool, problems: &mut Problems) -> bool {
        match self.get(key) {
            None => default,
            Some(value) => value.as_bool().unwrap_or_else(|| {
                problems.push(self.complaint(key, "must be true or false"));
                default
            }),
        }
    }

    /// A string.
    pub fn text<'a>(&'a self, key: &str, default: &'a str, problems: &mut Problems) -> &'a str {
        match self.get(key) {
            None => default,
            Some(value) => value.as_str().unwrap_or_else(|| {
                problems.push(self.complaint(key, "must be a string"));
                default
            }),
        }
    }
}

/// The value as JSON, cut to what a message can bear.
fn shortened(value: &Value) -> String {
    const LONGEST: usize = 120;
    let text = match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
