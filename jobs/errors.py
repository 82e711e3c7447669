"""Exit codes, and the whole error tree.

CandelabraError                      sharding/errors.py
├── StopJob                          the job cannot go on
│   ├── InputError                   2   spec, source file, column or model that cannot be used
│   │   ├── SpecError                2   the spec itself (with its line)
│   │   ├── SourceError              2   not Parquet, cut short, unreadable
│   │   ├── SchemaMismatchError      2   two source files disagree
│   │   └── ModelError               2   model folder or weights
│   ├── DriftError                   3   spec, model or source file changed since the plan
│   ├── CorruptStateError            3   a record under _candelabra/ contradicts another
│   ├── LeaseHeldError               4   another driver works on this output
│   ├── LeaseLostError               4   another driver took over
│   ├── InfrastructureError          5   cluster, device, network, placement
│   │   ├── AuthenticationError      5
│   │   ├── HubError                 5
│   │   └── DiskFullError            5
│   └── NotFoundError                6   input, job or model that is not there
├── RetryShard                       another attempt; after the last one the shard is failed and the job ends with 1
│   ├── StorageError
│   └── GroupLostError               counts as a worker's death; another group is made
└── RecordRow                        one row: null result, this text in `error`
"""

from __future__ import annotations

import enum

from sharding.errors import (
    CorruptStateError,
    DriftError,
    InfrastructureError,
    InputError,
    LeaseHeldError,
    LeaseLostError,
    NotFoundError,
    StorageError,
)


class ExitCode(enum.IntEnum):
    """What the command line's exit status means."""

    COMPLETE = 0
    FAILED_ROWS = 1
    USAGE = 2
    DRIFT = 3
    RUNNING = 4
    INFRASTRUCTURE = 5
    NOT_FOUND = 6
    INTERRUPTED = 130
    TERMINATED = 143


class SpecError(InputError):
    """The spec cannot be used: the message says where and which value."""


_CODES: tuple[tuple[type[Exception], ExitCode], ...] = (
    (InputError, ExitCode.USAGE),
    (DriftError, ExitCode.DRIFT),
    (CorruptStateError, ExitCode.DRIFT),
    (LeaseHeldError, ExitCode.RUNNING),
    (LeaseLostError, ExitCode.RUNNING),
    (InfrastructureError, ExitCode.INFRASTRUCTURE),
    (StorageError, ExitCode.INFRASTRUCTURE),
    (NotFoundError, ExitCode.NOT_FOUND),
)


def exit_code_of(error: Exception) -> ExitCode:
    """The exit code of an error, by its type."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return ExitCode.FAILED_ROWS
