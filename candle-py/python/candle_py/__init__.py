"""Models on Hugging Face's Candle: token ids in; hidden states, embeddings, logits or new tokens out. Knows no text."""

from __future__ import annotations

from candle_py._cuda import cuda_failure  # first: it decides which module `_native` is
from candle_py._native import (
    Array,
    Engine,
    Event,
    Generator,
    NcclCommunicator,
    TcpCommunicator,
    capabilities,
    convert_pickle,
    gguf_metadata,
    inspect,
    inspect_rank,
    nccl_unique_id,
)
from candle_py.errors import CommunicatorError, DeviceError, EngineError, InputError, InternalError, ModelError

__all__ = [
    "Array",
    "CommunicatorError",
    "DeviceError",
    "Engine",
    "EngineError",
    "Event",
    "Generator",
    "InputError",
    "InternalError",
    "ModelError",
    "NcclCommunicator",
    "TcpCommunicator",
    "capabilities",
    "convert_pickle",
    "cuda_failure",
    "gguf_metadata",
    "inspect",
    "inspect_rank",
    "nccl_unique_id",
]
