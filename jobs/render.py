"""For eyes: progress, plans, reports and findings as rich shows them. Computes nothing, decides nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from jobs.progress import JobProgress, ProgressListener
from jobs.verbs import PROGRAM
from sharding.words import counted

if TYPE_CHECKING:
    from jobs.doctor import Finding
    from jobs.paper import PaperPreview
    from jobs.preview import JobPreview
    from jobs.report import JobReport
    from jobs.spec import JobSpec
    from jobs.split import SplitPlan
    from jobs.status import JobStatus

_MOST_ERRORS = 10


@contextlib.contextmanager
def progress_display(*, enabled: bool) -> Iterator[ProgressListener | None]:
    """A live bar on stderr while entered: rows, tokens per second, time left. Silent where it is no terminal."""
    console = Console(stderr=True)
    if not enabled:
        yield None
        return
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rows  {task.fields[pace]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None, pace="")

        def show(now: JobProgress) -> None:
            bad = f", {counted(now.row_errors, 'bad row')}" if now.row_errors else ""
            failed = f", {counted(now.shards_failed, 'shard')} failed" if now.shards_failed else ""
            bar.update(
                task,
                description=now.phase,
                total=now.rows_total,
                completed=min(now.rows_done, now.rows_total),
                pace=f"{now.tokens_per_s:,.0f} tokens/s{bad}{failed}",
            )

        yield show


def render_report(report: JobReport) -> None:
    """What became of a job, on stdout."""
    console = Console()
    table = _table(f"{report.job}: {report.state.replace('_', ' ')}")
    _add_row(table, "output", report.output)
    _add_row(table, "rows", f"{report.rows:,} of {report.rows_planned:,}")
    _add_row(table, "shards", f"{report.shards_done:,} of {report.shards:,}")
    if report.row_errors:
        _add_row(table, "bad rows", f"{report.row_errors:,} ({report.row_error_rate:.2%})")
    _add_row(table, "tokens", f"{report.tokens:,}")
    _add_row(table, "size", _size(report.size_bytes))
    if report.computed_rows:
        _add_row(
            table,
            "this run",
            f"{counted(report.computed_rows, 'row')} in {report.seconds:.1f} s, {report.tokens_per_s:,.0f} tokens/s",
        )
    console.print(table)
    for message, count in list(report.error_counts.items())[:_MOST_ERRORS]:
        console.print(f"  {count:,} x {message}", markup=False, soft_wrap=True)
    for failed in report.failed_shards[:_MOST_ERRORS]:
        tries = counted(failed.attempts, "attempt")
        console.print(f"  shard {failed.shard} failed after {tries}: {failed.error}", markup=False, soft_wrap=True)


def render_warnings(spec: JobSpec) -> None:
    """Settings without effect, on stderr."""
    from jobs.effects import settings_without_effect

    for line in settings_without_effect(spec):
        Console(stderr=True).print(f"warning: {line}", markup=False, highlight=False, soft_wrap=True)


def render_preview(preview: JobPreview) -> None:
    """A plan, on stdout."""
    console = Console()
    table = _table(f"{preview.job}: plan")
    _add_input(table, preview)
    revision = f" @ {preview.revision}" if preview.revision else ""
    _add_row(table, "model", f"{preview.model}{revision} ({preview.architecture}, {preview.dtype})")
    for note in preview.notes:
        _add_row(table, "", note)
    if preview.token_histogram:
        histogram = "  ".join(f"{_bin(bound)}: {count}" for bound, count in preview.token_histogram.items())
        sampled = counted(preview.sampled_rows, "sampled row")
        _add_row(table, "tokens", f"{preview.mean_tokens} on average in {sampled}; {histogram}")
        took = "less than 1 s" if preview.estimated_s < 1 else f"about {preview.estimated_s:,.0f} s"
        _add_row(table, "time", f"{took} for one replica at {preview.tokens_per_s:,.0f} tokens/s")
    _add_row(table, "output", f"{preview.output}, about {_size(preview.output_bytes)}")
    _add_row(table, "columns", ", ".join(preview.columns))
    _add_row(table, "memory", f"about {_size(preview.replica_memory_bytes)} per replica")
    if preview.split is not None:
        _add_row(table, "replicas", preview.replicas or "")
        _add_split(table, preview.split)
    console.print(table)
    for hazard in preview.hazards:
        console.print(f"  ! {hazard}", markup=False, soft_wrap=True)


def render_paper(preview: PaperPreview) -> None:
    """A plan without weights, on stdout."""
    console = Console()
    table = _table(f"{preview.job}: plan without weights")
    _add_input(table, preview)
    _add_row(table, "model", f"{preview.model} ({preview.architecture}, {preview.dtype})")
    _add_row(table, "output", preview.output)
    if preview.columns:
        _add_row(table, "columns", ", ".join(preview.columns))
    _add_row(table, "replicas", preview.replicas)
    _add_split(table, preview.split)
    console.print(table)
    for hazard in preview.hazards:
        console.print(f"  ! {hazard}", markup=False, soft_wrap=True)


def _add_row(table: Table, *cells: str) -> None:
    """Texts as they are: brackets in them mean nothing."""
    table.add_row(*map(Text, cells))


def _table(title: str) -> Table:
    """Two columns; what is too long for its place goes on in the next line and is never cut."""
    columns = Column(overflow="fold"), Column(overflow="fold")
    return Table(*columns, title=Text(title), title_justify="left", show_header=False)


def _add_input(table: Table, preview: JobPreview | PaperPreview) -> None:
    if not preview.files:
        return
    _add_row(
        table,
        "input",
        f"{counted(preview.files, 'file')}, {counted(preview.rows, 'row')}, {_size(preview.input_bytes)}",
    )
    _add_row(table, "shards", f"{preview.shards:,}")


def _add_split(table: Table, split: SplitPlan) -> None:
    _add_row(table, "weights", f"{split.rank_weight_bytes:,} bytes per rank, of {split.weight_bytes:,} bytes in all")
    if split.cache_token_bytes:
        _add_row(table, "cache", f"{split.cache_token_bytes:,} bytes per token on each rank, in {split.cache_dtype}")
    what = "weights, work, and the longest row's cache" if split.cache_token_bytes else "weights and work"
    _add_row(table, "rank", f"{split.rank_bytes:,} bytes at least: {what}")
    for gigabytes, tokens in split.cache_tokens.items():
        fits = (
            f"{counted(tokens or 0, 'token')} of float32 cache beside the weights"
            if split.cache_token_bytes
            else "fits"
        )
        room = "does not fit" if tokens is None else fits
        _add_row(table, f"{gigabytes} GB", room)
    if split.all_reduces:
        told = f"{split.all_reduces} of {split.all_reduce_bytes:,} bytes for each token of a step, in float32"
        _add_row(table, "all-reduces", told)
    if split.ranks > 1 and split.one_device_gb is not None:
        whole = f"a device of {split.one_device_gb} GB holds the whole model:"
        _add_row(table, "", f"{whole} there, model.tensor_parallel: 1 and more replicas do more rows per second")


def render_status(status: JobStatus) -> None:
    """How far a job is, on stdout."""
    console = Console()
    console.print(
        f"{status.job}: {status.state}; {status.rows_done:,} of {counted(status.rows, 'row')} committed, "
        f"{status.shards_done:,} of {counted(status.shards, 'shard')}, {counted(status.row_errors, 'bad row')}",
        markup=False,
    )
    if status.state == "not planned":
        told = f"  its driver ended before there were workers: `{PROGRAM} submit` starts it again"
        console.print(told, markup=False, soft_wrap=True)
    if status.driver:
        console.print(f"  driver: {status.driver}", markup=False)
    if status.progress and status.progress.get("remaining_s") is not None:
        console.print(
            f"  {status.progress['tokens_per_s']:,.0f} tokens/s, about {status.progress['remaining_s']:,.0f} s left",
            markup=False,
        )


def render_list(jobs: Sequence[JobStatus]) -> None:
    """Several jobs, one a line, on stdout."""
    if not jobs:
        Console().print("no jobs")
        return
    table = Table(*(Column(name, overflow="fold") for name in ("job", "state", "rows", "bad rows", "output")))
    for job in jobs:
        _add_row(table, job.job, job.state, f"{job.rows_done:,}/{job.rows:,}", f"{job.row_errors:,}", job.output)
    Console().print(table)


def render_findings(findings: Sequence[Finding]) -> None:
    """What `doctor` found, on stdout."""
    console = Console()
    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    for finding in findings:
        line = Text.assemble((f"{finding.status:8}", styles[finding.status]), f"{finding.area:12} {finding.what}")
        console.print(line, soft_wrap=True)  # never broken: hints hold commands to copy
        if finding.hint:
            console.print(Text(f"{'':8}-> {finding.hint}"), soft_wrap=True)


def _bin(bound: str) -> str:
    return f"<={bound}" if bound.isdigit() else bound


def _size(size_bytes: int) -> str:
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.1f} {unit}" if unit != "B" else f"{size:,.0f} B"
        size /= 1024
    return f"{size:,.1f} TiB"
