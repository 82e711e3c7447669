//! Encoders and decoders over ragged batches: token ids in, hidden states, embeddings, logits or new tokens out. No
//! Python, no tokenizer.
//!
//! A forward reads top to bottom as [`Engine`]: a checked [`Ragged`] batch is cut into chunks, each chunk runs the
//! whole network on one thread, and its rows are pooled and written where they belong. Nothing of a row's result
//! depends on the rows beside it.

mod backend;
mod batch;
mod blueprint;
pub mod comm;
mod config;
pub mod cpu;
mod cuda;
mod engine;
mod error;
mod features;
pub mod generate;
mod gguf;
mod group;
mod info;
mod kv_cache;
mod lanes;
mod models;
mod orders;
mod pickle;
mod placement;
mod pooling;
mod rotary;
mod session;
mod shard;
mod team;
mod weights;
mod workers;

pub use batch::Ragged;
pub use engine::{EmbedOptions, Engine, LoadOptions, Output};
pub use error::{Error, Result, catching_panics};
pub use features::cpu_features;
pub use gguf::{GgufFile, GgufValue};
pub use info::{Info, inspect, inspect_rank};
pub use pickle::{Converted, convert_pickle};
pub use placement::{Device, Dtype, cuda_devices, has_cuda};
pub use pooling::{Pooling, PoolingMode};
pub use session::DecoderSession;
pub use shard::Slice;
pub use workers::available_threads;

/// The version of Candle that the engine is built on.
pub const CANDLE_VERSION: &str = "0.11.1";

/// The version of the engine.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");
