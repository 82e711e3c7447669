"""Engines: token ids in, one float32 vector per row out. `candle` is real, `fake` serves tests of the rest."""

from workers.engine.base import BatchOutput, Engine, EngineInfo
from workers.engine.load import load_engine

__all__ = ["BatchOutput", "Engine", "EngineInfo", "load_engine"]
