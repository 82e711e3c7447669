//! What can go wrong, by who can mend it: the model's files, the caller's arguments, the device, the other ranks, or us.

use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

/// The engine's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An engine error: a lower-case clause with the offending value last in backticks, and what to do next as a hint.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model's files or configuration are missing, damaged or of a kind that is not supported.
    #[error("{message}")]
    Model {
        /// What is wrong.
        message: String,
        /// What to do next.
        hint: Option<String>,
    },
    /// The caller's token ids, offsets or options are not valid for this model.
    #[error("{message}")]
    Input {
        /// What is wrong.
        message: String,
        /// What to do next.
        hint: Option<String>,
    },
    /// The device, or a feature of it, that was asked for is not there.
    #[error("{message}")]
    Device {
        /// What is wrong.
        message: String,
        /// What to do next.
        hint: Option<String>,
    },
    /// A rank of the group is gone, silent, a stranger or out of step.
    #[error("{message}")]
    Communicator {
        /// What is wrong.
        message: String,
        /// What to do next.
        hint: Option<String>,
    },
    /// A fault of the engine itself.
    #[error("{message}")]
    Internal {
        /// What is wrong.
        message: String,
        /// What to do next.
        hint: Option<String>,
    },
}

impl Error {
    /// A fault in the model's files.
    pub fn model(message: impl Into<String>) -> Self {
        Error::Model { message: message.into(), hint: None }
    }

    /// A fault in the caller's arguments.
    pub fn input(message: impl Into<String>) -> Self {
        Error::Input { message: message.into(), hint: None }
    }

    /// A fault of the device or of what was asked of it.
    pub fn device(message: impl Into<String>) -> Self {
        Error::Device { message: message.into(), hint: None }
    }

    /// A fault among the ranks of a group.
    pub fn communicator(message: impl Into<String>) -> Self {
        Error::Communicator { message: message.into(), hint: None }
    }

    /// A fault of the engine itself.
    pub fn internal(message: impl Into<String>) -> Self {
        Error::Internal { message: message.into(), hint: None }
    }

    /// The same error with what to do next.
    #[must_use]
    pub fn with_hint(mut self, next: impl Into<String>) -> Self {
        match &mut self {
            Error::Model { hint, .. }
            | Error::Input { hint, .. }
            | Error::Device { hint, .. }
            | Error::Communicator { hint, .. }
            | Error::Internal { hint, .. } => *hint = Some(next.into()),
        }
        self
    }

    /// What to do next, where something is known to help.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Error::Model { hint, .. }
            | Error::Input { hint, .. }
            | Error::Device { hint, .. }
            | Error::Communicator { hint, .. }
            | Error::Internal { hint, .. } => hint.as_deref(),
        }
    }

    /// A file of the model that could not be used, with the reason.
    pub(crate) fn file(path: &Path, reason: impl Display) -> Self {
        Error::model(format!("{reason}: `{}`", path.display()))
    }
}

/// Runs `work`; a panic inside it becomes an internal error, so that no caller has to unwind through foreign frames.
pub fn catching_panics<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message");
        Err(Error::internal(format!("the engine panicked: `{text}`"))
            .with_hint("please report this, with what led to it"))
    })
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        match failure_of_device(&error) {
            Some(failure) => Error::device(format!("device failed: `{failure}`"))
                .with_hint("if it is out of memory: a smaller batch or cache, weights in bfloat16, or more ranks"),
            None => Error::internal(format!("candle failed: `{error}`")),
        }
    }
}

/// What the device says, where it is the device that failed.
fn failure_of_device(error: &candle_core::Error) -> Option<String> {
    match error {
        candle_core::Error::Cuda(failure) => Some(failure.to_string()),
        candle_core::Error::WithBacktrace { inner, .. } | candle_core::Error::Context { inner, .. } => {
            failure_of_device(inner)
        }
        _ => None,
    }
}

/// Faults found in a model, gathered so that all are told together.
#[derive(Debug, Default)]
pub struct Problems(Vec<String>);

impl Problems {
    /// More are counted but not listed.
    const LISTED: usize = 100;

    /// Notes one more.
    pub fn push(&mut self, problem: impl Into<String>) {
        self.0.push(problem.into());
    }

    /// Whether none was found.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// `Ok` when nothing was found, else one model error that lists everything found in `place`.
    pub fn into_result(self, place: &Path) -> Result<()> {
        match self.0.as_slice() {
            [] => Ok(()),
            [only] => Err(Error::model(only.clone())),
            all => {
                let mut message = format!("the model has {} problems: `{}`", all.len(), place.display());
                for problem in all.iter().take(Self::LISTED) {
                    message.push_str("\n- ");
                    message.push_str(problem);
                }
                if all.len() > Self::LISTED {
                    message.push_str(&format!("\n- and {} more", all.len() - Self::LISTED));
                }
                Err(Error::model(message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Error, catching_panics};

    #[test]
    fn a_panic_becomes_an_internal_error_that_repeats_it() {
        let error = catching_panics::<()>(|| panic!("row {} of {}", 3, 2)).unwrap_err();
        assert!(matches!(error, Error::Internal { .. }));
        assert_eq!(error.to_string(), "the engine panicked: `row 3 of 2`");
        assert_eq!(catching_panics(|| Ok(7)).unwrap(), 7);
    }

    #[test]
    fn a_failing_device_is_told_from_a_fault_of_ours() {
        let failure = || candle_core::Error::Cuda("out of memory".into());
        for error in [failure(), failure().bt(), failure().context("a product")] {
            let error = Error::from(error);
            assert!(matches!(error, Error::Device { .. }));
            assert_eq!(error.to_string(), "device failed: `out of memory`");
        }
        assert!(matches!(Error::from(candle_core::Error::Msg("out of memory".into())), Error::Internal { .. }));
    }
}
