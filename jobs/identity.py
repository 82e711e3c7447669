"""What a resumed job must agree with its plan in: every setting that decides the output's bytes, by the user's names.

Compares nothing itself; `sharding.plan_file.check_drift` does, and shows these names.
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import is_dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from jobs.spec import JobSpec
from workers.config import ModelConfig, TaskConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

CHAT_DATE = "task.chat_date"
"""Name of the day that the chat template sees."""
_USER_NAMES = {
    "task.decoder.sampling.stop_ids": "task.generation.stop_tokens",
    "task.decoder.sampling.": "task.generation.",
    "task.decoder.max_positions": "model.max_positions",
    "task.decoder.": "task.",
    "task.include_prompt": "model.include_prompt",
    "task.width": "model.width",
}
"""Beginnings of settings' names as workers have them, and the spec's for them; the first that fits counts."""


def make_identity(spec: JobSpec, task: TaskConfig, model: ModelConfig, schema: pa.Schema) -> dict[str, str]:
    """Settings as text, by name.

    Args:
        spec: What was asked.
        task: What was decided.
        model: The model as pinned.
        schema: Of the output.
    """
    fields = {_user_name(name): value for name, value in _flat("task", task).items()}
    if task.decoder is not None and spec.task.messages is None:  # messages that the user never wrote
        fields["task.chat"] = bool(fields.pop("task.messages"))
    fields |= {
        "model.revision": model.revision,
        "model.digest": model.digest,
        "model.dtype": model.dtype,
        "output.schema": "; ".join(f"{field.name}: {field.type}" for field in schema),
        "output.on_conflict": spec.output.on_conflict,
        "sharding.target_rows": spec.sharding.target_rows,
        "sharding.target_bytes": spec.sharding.target_bytes,
        "candelabra": importlib.metadata.version("candelabra"),
    }
    if model.dtype == "int8":  # a rank's part of a row is rounded to other bytes than the whole of it
        fields["model.tensor_parallel"] = spec.model.tensor_parallel
    return {name: str(value) for name, value in fields.items()}


def _user_name(name: str) -> str:
    start = next((start for start in _USER_NAMES if name.startswith(start)), "")
    return _USER_NAMES.get(start, "") + name.removeprefix(start)


def _flat(prefix: str, settings: DataclassInstance) -> dict[str, object]:
    """Fields of nested settings by dotted name; settings that are not there have none."""
    found: dict[str, object] = {}
    for name in settings.__dataclass_fields__:
        value = getattr(settings, name)
        if is_dataclass(value) and not isinstance(value, type):
            found |= _flat(f"{prefix}.{name}", value)
        elif f"{prefix}.{name}" not in ("task.decoder", "task.decoder.sampling"):
            found[f"{prefix}.{name}"] = value
    return found
