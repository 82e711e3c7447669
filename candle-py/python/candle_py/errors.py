"""What the engine raises, by who can mend it; the native module raises these classes.

EngineError
├── ModelError         the model's files or configuration: missing, damaged, or of a kind that is not supported
├── InputError         token ids, offsets or options that are not valid for this model
├── DeviceError        a device, dtype or instruction set that this build or machine does not have
├── CommunicatorError  a rank of a tensor-parallel group is gone, silent, a stranger or out of step
└── InternalError      a fault of the engine itself, panics included
"""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    """A lower-case clause with the offending value last in backticks; `hint` says what to do next, where known."""

    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def __reduce__(self) -> tuple[type[EngineError], tuple[str, str | None]]:
        """Keep the hint when the error crosses a process boundary."""
        return type(self), (str(self), self.hint)


class ModelError(EngineError):
    """The model's files or configuration are missing, damaged or of a kind that is not supported."""

    kind: ClassVar[str] = "model"


class InputError(EngineError):
    """Token ids, offsets or options are not valid for this model."""

    kind: ClassVar[str] = "input"


class DeviceError(EngineError):
    """A device, dtype or instruction set was asked for that this build or machine does not have."""

    kind: ClassVar[str] = "device"


class CommunicatorError(EngineError):
    """A rank of a tensor-parallel group is gone, silent, a stranger or out of step; the group is over."""

    kind: ClassVar[str] = "communicator"


class InternalError(EngineError):
    """The engine itself is at fault; a panic inside it ends here too."""
