"""A job that is refused before its first shard is handed out leaves its output as it was. Removes no plan and no row.

The plan is written once there are workers, so a refused job has no plan to take back: what there is to remove are the
lease, the driver's progress and the folders made for them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs.keeper import LeaseKeeper
from sharding import layout
from sharding.errors import CandelabraError, LeaseLostError
from sharding.storage import SCRATCH, Storage

_log = logging.getLogger(__name__)


def absent_folders(output: Storage) -> tuple[Path, ...]:
    """Folders of this machine that the first write into an output will make, the innermost first."""
    root = output.local_root
    if root is None:
        return ()
    folders = [root / SCRATCH, root / layout.LEASES, root / layout.STATE, root, *root.parents]
    return tuple(folder for folder in folders if not folder.exists())


@contextlib.contextmanager
def leaving_no_trace(output: Storage, keeper: LeaseKeeper, absent: Sequence[Path]) -> Iterator[None]:
    """Where the job ends with an error: nothing of this run stays, but for the plan and its receipts if there is one.

    Args:
        output: The output.
        keeper: Of its lease.
        absent: What `absent_folders` said before the lease was taken.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, LeaseLostError):
            try:
                _clear(output, keeper, absent)
            except CandelabraError as failure:
                _log.warning("what this run wrote could not be removed: %s", failure)
        raise


def _clear(output: Storage, keeper: LeaseKeeper, absent: Sequence[Path]) -> None:
    keeper.check_now()
    output.delete(layout.PROGRESS)
    if output.exists(layout.PLAN):
        return
    keeper.discard()
    for folder in absent:
        with contextlib.suppress(OSError):  # it is not empty: somebody else has begun to write there
            folder.rmdir()
