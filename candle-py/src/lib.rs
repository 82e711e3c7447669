//! The Python face of the engine: conversion, the GIL, errors. This file only registers.

mod arrays;
mod arrow;
mod communicator;
mod engine;
mod error;
mod generator;
mod gguf;
mod inputs;
mod process;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// The native half of `candle_py`.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::arrays::Array;
    #[pymodule_export]
    use crate::communicator::{NcclCommunicator, TcpCommunicator, nccl_unique_id};
    #[pymodule_export]
    use crate::engine::{Engine, capabilities, convert_pickle, inspect, inspect_rank};
    #[pymodule_export]
    use crate::generator::{Event, Generator};
    #[pymodule_export]
    use crate::gguf::gguf_metadata;
}
