"""Errors about models, under the tree that `sharding.errors` begins. Decides nothing; exit codes live in `jobs.errors`.

StopJob
├── InputError
│   └── ModelError      a model folder that cannot be used: a file missing, broken, or at odds with another
└── InfrastructureError
    └── HubError        the Hub or its mirror cannot be reached, or keeps failing
RetryShard
└── GroupLostError      a rank of the group that holds the model is gone or silent; the group is over
"""

from __future__ import annotations

from sharding.errors import InfrastructureError, InputError, RetryShard


class ModelError(InputError):
    """What a model's files say cannot be used, or two of them disagree."""


class HubError(InfrastructureError):
    """The Hub (or the mirror named by `HF_ENDPOINT`) does not answer, or answers with a failure of its own."""


class GroupLostError(RetryShard):
    """A rank of the group that holds the model is gone, silent or out of step: nobody computes with it any more."""
