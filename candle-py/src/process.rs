//! The process that an engine was loaded in: a fork has its memory, but none of its threads, devices and connections.

use candle_engine::{Device, Engine, Error};

/// Where an engine can be used.
#[derive(Clone, Copy)]
pub struct Home {
    process: u32,
    /// It computes on the caller's thread alone.
    is_anywhere: bool,
}

impl Home {
    /// This process.
    pub fn of(engine: &Engine) -> Self {
        let is_anywhere = engine.threads() == 1 && engine.device() == Device::Cpu && engine.rank_and_world().1 == 1;
        Self { process: std::process::id(), is_anywhere }
    }

    /// Refuses a call that would wait for ever for threads that are in another process.
    pub fn check(self) -> Result<(), Error> {
        if self.is_anywhere || self.process == std::process::id() {
            return Ok(());
        }
        Err(Error::input(format!("engine was loaded before a fork, its threads are in process: `{}`", self.process))
            .with_hint("load the engine in the child process, or start that with multiprocessing's spawn"))
    }
}
