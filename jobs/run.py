"""The driver's loop: hand out shards, gather results, commit each one, tell how far it is. Plans and seals nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate

from jobs.backend import Backend, Died, Errored, Event, Finished
from jobs.dispatch import Dispatcher, FailedShard, Work
from jobs.interrupts import Interrupts
from jobs.keeper import LeaseKeeper
from jobs.progress import JobProgress, ProgressListener
from jobs.report import Run
from sharding import layout
from sharding.commit import commit_shard, promote
from sharding.cut import Piece
from sharding.errors import CandelabraError, InfrastructureError, StopJob
from sharding.manifest import ShardFailure, ShardReceipt, encode, now
from sharding.plan import ShardPlan
from sharding.storage import Storage
from workers.config import AssignedPiece, Assignment, ShardResult

_log = logging.getLogger(__name__)
_WAIT_S = 0.5
_PROGRESS_S = 1.0
_COMMITTERS = 8


@dataclass(frozen=True, slots=True)
class Todo:
    """How a shard is to be computed: which generation, and which part's good rows are kept."""

    generation: int
    repair_part: str | None


class ShardRunner:
    """Runs the shards of one job until each is committed or failed. `receipts` gains one per committed shard."""

    def __init__(
        self,
        job: str,
        output: Storage,
        plan: ShardPlan,
        receipts: dict[int, ShardReceipt],
        todo: Mapping[int, Todo],
        dispatcher: Dispatcher,
        *,
        keeper: LeaseKeeper,
        interrupts: Interrupts,
        on_progress: ProgressListener | None,
    ) -> None:
        self._job = job
        self._output = output
        self._plan = plan
        self._receipts = receipts
        self._todo = todo
        self._first_rows = (0, *accumulate(file.rows for file in plan.files))
        self._dispatcher = dispatcher
        self._keeper = keeper
        self._interrupts = interrupts
        self._on_progress = on_progress
        self._working: dict[int, Work] = {}
        self._commits: dict[Future[ShardReceipt], tuple[Work, ShardResult]] = {}
        self._rows_before = sum(plan.shards[index].rows for index in receipts if index not in todo)
        self._rows_done = 0
        self._tokens_done = 0
        self._replicas = 0
        self._started = time.monotonic()
        self._told = 0.0

    def run(self, backend: Backend, on_started: Callable[[], object]) -> Run:
        """Start the backend, work everything off, stop it.

        Args:
            backend: Not started yet.
            on_started: Called once it is there, before anything is handed out.

        Returns:
            Figures of this run.

        Raises:
            StopJob: The job cannot go on; what is committed stays.
        """
        committers = ThreadPoolExecutor(_COMMITTERS, thread_name_prefix="commit")
        try:
            self._tell("starting workers", backend)
            self._replicas = backend.start(lambda: self._interrupts.wind_down)
            on_started()
            self._started = time.monotonic()
            while not self._dispatcher.finished and not self._interrupts.abort:
                self._keeper.check()
                if self._interrupts.wind_down and not self._working and not self._commits:
                    break
                self._hand_out(backend)
                for event in backend.wait(_WAIT_S if not self._commits else _WAIT_S / 10):
                    self._handle(event, committers)
                self._gather_commits()
                self._tell("running", backend)
            self._tell("running", backend, at_once=True)
            seconds = time.monotonic() - self._started
        except StopJob:
            self._keeper.check_now()
            raise
        finally:
            committers.shutdown(wait=True, cancel_futures=True)
            backend.stop()
        return Run(seconds, self._rows_done, self._tokens_done, self._interrupts.code)

    def _hand_out(self, backend: Backend) -> None:
        if self._interrupts.wind_down:
            return
        for replica in backend.idle():
            work = self._dispatcher.next_work()
            if work is None:
                return
            self._working[replica] = work
            backend.assign(replica, self._assignment(work))

    def _assignment(self, work: Work) -> Assignment:
        shard, todo = self._plan.shards[work.shard], self._todo[work.shard]
        return Assignment(
            shard=work.shard,
            pieces=assigned_pieces(self._plan, shard.pieces, self._first_rows),
            rows=shard.rows,
            generation=todo.generation,
            epoch=self._keeper.epoch,
            attempt=work.attempt,
            poison_rows=work.poison_rows,
            probe=work.probe,
            repair_part=todo.repair_part,
        )

    def _handle(self, event: Event, committers: ThreadPoolExecutor) -> None:
        work = self._working.pop(event.replica, None)
        if work is None:
            if isinstance(event, Errored):
                raise _stopping(event.error)
        elif isinstance(event, Died):
            _log.warning("shard=%d attempt=%d %s", work.shard, work.attempt, event.reason)
            self._dispatcher.worker_died(work, event.reason, blameless=event.blameless)
            self._note_failure(work)
        elif isinstance(event, Errored):
            if isinstance(event.error, StopJob):
                raise event.error
            self._errored(work, event.error)
        elif isinstance(event, Finished):
            if work.probe is not None:
                self._dispatcher.succeeded(work)
            else:
                self._commits[committers.submit(self._commit, work, event.result)] = (work, event.result)

    def _errored(self, work: Work, error: Exception) -> None:
        text = str(error) if isinstance(error, CandelabraError) else f"{type(error).__name__}: {error}"
        _log.warning("shard=%d attempt=%d failed: %s", work.shard, work.attempt, text, exc_info=error)
        self._dispatcher.errored(work, text, getattr(error, "hint", None))
        self._note_failure(work)

    def _commit(self, work: Work, result: ShardResult) -> ShardReceipt:
        before = self._receipts.get(work.shard)
        outcome = commit_shard(
            self._output,
            ShardReceipt(
                shard=result.shard,
                generation=result.generation,
                epoch=self._keeper.epoch,
                attempt=result.attempt,
                attempt_file=result.attempt_file,
                part=self._plan.part_name(result.shard),
                rows=result.rows,
                row_errors=result.row_errors,
                error_counts=result.error_counts,
                tokens=result.tokens + (before.tokens if before else 0),
                size_bytes=result.size_bytes,
                sha256=result.sha256,
                plan_digest=self._plan.digest,
                seconds=round(result.seconds, 3),
                poison_rows=work.poison_rows,
            ),
        )
        promote(self._output, outcome.receipt)
        return outcome.receipt

    def _gather_commits(self) -> None:
        for future in [future for future in self._commits if future.done()]:
            work, result = self._commits.pop(future)
            try:
                receipt = future.result()
            except StopJob:
                raise
            except CandelabraError as error:
                self._errored(work, error)
                continue
            self._receipts[work.shard] = receipt
            self._rows_done += receipt.rows
            self._tokens_done += result.tokens
            self._dispatcher.succeeded(work)
            self._output.delete(layout.failure_path(work.shard))

    def _note_failure(self, work: Work) -> None:
        failed: FailedShard | None = self._dispatcher.failed.get(work.shard)
        if failed is not None:
            record = ShardFailure(
                shard=failed.shard, attempts=failed.attempts, error=failed.error, hint=failed.hint, at=now()
            )
            self._output.write_bytes(layout.failure_path(failed.shard), encode(record))

    def _tell(self, phase: str, backend: Backend, *, at_once: bool = False) -> None:
        if time.monotonic() - self._told < _PROGRESS_S and not at_once:
            return
        running = backend.totals()
        seconds = time.monotonic() - self._started
        rows = self._rows_done + running.rows
        pace = rows / seconds if seconds > 0 else 0.0
        left = self._plan.rows - self._rows_before - rows
        progress = JobProgress(
            job=self._job,
            phase="winding down" if self._interrupts.wind_down else phase,
            rows_done=self._rows_before + rows,
            rows_total=self._plan.rows,
            row_errors=sum(receipt.row_errors for receipt in self._receipts.values()),
            shards_done=len(self._receipts),
            shards_total=len(self._plan.shards),
            shards_failed=len(self._dispatcher.failed),
            replicas=self._replicas,
            rows_per_s=pace,
            tokens_per_s=(self._tokens_done + running.tokens) / seconds if seconds > 0 else 0.0,
            remaining_s=max(0.0, left / pace) if pace > 0 else None,
        )
        self._told = time.monotonic()
        self._output.write_bytes(layout.PROGRESS, progress.to_json())
        if self._on_progress is not None:
            self._on_progress(progress)


def assigned_pieces(plan: ShardPlan, pieces: Sequence[Piece], first_rows: Sequence[int]) -> tuple[AssignedPiece, ...]:
    """Pieces of a shard as a worker gets them; `first_rows` is the place of each file's first row in the input."""
    return tuple(
        AssignedPiece(
            plan.files[piece.file].path, plan.files[piece.file].version, piece.start, piece.stop, first_rows[piece.file]
        )
        for piece in pieces
    )


def _stopping(error: Exception) -> StopJob:
    """An error from a worker that had no shard yet: it could not even load."""
    if isinstance(error, StopJob):
        return error
    return InfrastructureError(f"a worker could not start ({type(error).__name__}): `{error}`")
