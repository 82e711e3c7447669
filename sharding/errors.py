"""The root of the error tree: what every station of the journey raises. Rendering and exit codes live in `jobs.errors`.

Three kinds, told apart by type and never by message text:

    CandelabraError
    ├── StopJob         the job cannot go on; the user or the operator must act
    ├── RetryShard      this attempt of a shard is lost; another may succeed
    └── RecordRow       one row is bad; it keeps its place, with a null result and this text in `error`

A message is a lower-case clause, the offending value last after a colon in backticks; `hint` says what to do next.
The whole tree, with exit codes, is drawn in `jobs/errors.py`.
"""

from __future__ import annotations


class CandelabraError(Exception):
    """Base of every error that this project raises on purpose.

    Args:
        message: Lower-case clause with the offending value last.
        hint: What the reader can do about it, or None.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.hint))


def _rebuild(kind: type[CandelabraError], message: str, hint: str | None) -> CandelabraError:
    return kind(message, hint=hint)


class StopJob(CandelabraError):  # noqa: N818 - says what to do, not what happened
    """The job cannot go on."""


class RetryShard(CandelabraError):  # noqa: N818
    """This attempt is lost, another one may succeed."""


class RecordRow(CandelabraError):  # noqa: N818
    """One row is bad: it is written with a null result and this message."""


class InputError(StopJob):
    """What the user named cannot be used: the spec, a source file, a column, a model folder."""


class SourceError(InputError):
    """A source file cannot be read as Parquet."""


class SchemaMismatchError(InputError):
    """Two source files do not agree on their columns."""


class NotFoundError(StopJob):
    """Something that was named does not exist: an input, a job, a model."""


class DriftError(StopJob):
    """The plan on disk and what is asked for now, or an input file and the plan, no longer agree."""


class LeaseHeldError(StopJob):
    """Another driver works on this output."""


class LeaseLostError(StopJob):
    """Another driver took this output over while we worked."""


class InfrastructureError(StopJob):
    """Machine, cluster, network or permissions: nothing the spec could change."""


class AuthenticationError(InfrastructureError):
    """Credentials are missing or refused."""


class DiskFullError(InfrastructureError):
    """No space is left where a part has to be written."""


class StorageError(RetryShard):
    """A store kept failing after every retry."""


class CorruptStateError(StopJob):
    """A record under `_candelabra/` cannot be read or contradicts another."""


class IncompleteError(StopJob):
    """The job cannot be sealed: planned shards have no receipt."""


class RowErrorLimitError(StopJob):
    """The job is complete but has more bad rows than the spec allows; everything is written, nothing is sealed."""
