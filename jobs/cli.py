"""The command line: arguments in, exit code out. No logic of its own; heavy imports wait until a verb needs them."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from jobs.terminal import fail, fail_usage, log_to_stderr, print_json, show
from jobs.verbs import PROGRAM

if TYPE_CHECKING:
    from jobs.spec import JobSpec

app = typer.Typer(
    name=PROGRAM,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SpecFile = Annotated[Path, typer.Argument(metavar="SPEC.yaml", help="The job's spec.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this at run time
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field: --set model.dtype=float32"),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
BackendName = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--backend", help="ray or local, instead of the spec's."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log to stderr.")]
Output = Annotated[str, typer.Argument(metavar="OUTPUT", help="The job's output folder, or its spec.")]


@app.callback(invoke_without_command=True)
def program(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Offline batch inference over Parquet: every row exactly once."""
    if version:
        from importlib.metadata import version as version_of

        print(f"{PROGRAM} {version_of('candelabra')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


def main() -> None:
    """Entry point of `jobs`, `candelabra` and `python -m jobs`."""
    from jobs.errors import ExitCode
    from sharding.errors import CandelabraError

    try:
        code = app(standalone_mode=False, prog_name=PROGRAM)
    except CandelabraError as error:
        fail(error)
    except Exception as error:
        if not hasattr(error, "format_message"):  # else the command line could not be read
            raise
        fail_usage(error)
    if code == ExitCode.INTERRUPTED:
        print("interrupted before anything was started", file=sys.stderr)
    sys.exit(code or 0)


def _load(spec: Path, overrides: list[str] | None, backend: str | None = None) -> JobSpec:
    from jobs.spec import load_spec

    chosen = list(overrides or [])
    if backend is not None:
        chosen.append(f"backend={backend}")
    return load_spec(spec, chosen)


def _load_begun(spec: Path, overrides: list[str] | None, backend: str | None) -> JobSpec:
    """A spec whose output holds a job already."""
    from jobs.status import has_plan
    from sharding.errors import NotFoundError

    job = _load(spec, overrides, backend)
    if not has_plan(job.output.path):
        raise NotFoundError(
            f"there is no job to go on with at: `{job.output.path}`", hint=f"`{PROGRAM} submit {spec}` starts one"
        )
    return job


@app.command()
def validate(spec: SpecFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check a spec, and print it with every default filled in. Looks at no data."""
    from jobs.render import render_warnings
    from jobs.split import check_ranks
    from jobs.weight_bytes import check_dtype

    job = _load(spec, overrides)
    check_ranks(job)
    check_dtype(job.model.dtype, job.model.device)
    render_warnings(job)
    if as_json:
        print_json(job.model_dump(mode="json"))
    else:
        import yaml

        print(yaml.safe_dump(job.model_dump(mode="json"), sort_keys=False, allow_unicode=True), end="")


@app.command()
def plan(spec: SpecFile, overrides: Overrides = None, as_json: Json = False) -> None:
    """Show files, rows, shards, tokens, expected time and every hazard in sight. Starts and writes nothing."""
    from jobs.paper import preview_on_paper
    from jobs.preview import preview_job
    from jobs.render import render_paper, render_preview

    job = _load(spec, overrides)
    if (paper := preview_on_paper(job)) is not None:
        show(paper, render_paper, as_json=as_json)
    else:
        show(preview_job(job), render_preview, as_json=as_json)


@app.command()
def submit(
    spec: SpecFile,
    overrides: Overrides = None,
    backend: BackendName = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Run a job to its end. The same spec on the same output goes on where an earlier run stopped."""
    _run(_load(spec, overrides, backend), as_json=as_json, verbose=verbose)


@app.command()
def resume(
    spec: SpecFile,
    overrides: Overrides = None,
    backend: BackendName = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """As submit, but only if the output already holds a plan."""
    _run(_load_begun(spec, overrides, backend), as_json=as_json, verbose=verbose)


@app.command("retry-failed")
def retry_failed(
    spec: SpecFile,
    overrides: Overrides = None,
    backend: BackendName = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Compute again the rows that have an error, and the shards that failed; all other rows stay as they are."""
    _run(_load_begun(spec, overrides, backend), as_json=as_json, verbose=verbose, retry=True)


def _run(spec: JobSpec, *, as_json: bool, verbose: bool, retry: bool = False) -> None:
    from jobs.driver import run_job
    from jobs.render import progress_display, render_report, render_warnings

    log_to_stderr(verbose=verbose)
    render_warnings(spec)
    # stdout is for data: what Ray prints of lost workers is none.
    with contextlib.redirect_stdout(sys.stderr), progress_display(enabled=not as_json) as listener:
        report = run_job(spec, retry_failed=retry, on_progress=listener)
    show(report, render_report, as_json=as_json)
    sys.exit(report.exit_code)


@app.command()
def status(output: Output, as_json: Json = False) -> None:
    """How far a job is, from its files alone: needs no cluster."""
    from jobs.render import render_status
    from jobs.status import job_status

    show(job_status(_output_of(output)), render_status, as_json=as_json)


@app.command()
def report(output: Output, as_json: Json = False) -> None:
    """What became of a job: rows, errors by kind, shards that failed, files."""
    from jobs.render import render_report
    from jobs.status import job_report

    show(job_report(_output_of(output)), render_report, as_json=as_json)


@app.command("list")
def list_jobs(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Where outputs lie.")] = ".", as_json: Json = False
) -> None:
    """The jobs whose outputs lie in a folder."""
    from jobs.render import render_list
    from jobs.status import find_jobs

    show(find_jobs(folder), render_list, as_json=as_json)


@app.command()
def gc(output: Output, as_json: Json = False) -> None:
    """Remove what dead drivers and workers left behind; never a row. Refused while a driver works."""
    from jobs.status import collect_garbage

    removed = collect_garbage(_output_of(output))
    if as_json:
        print_json(removed)
    else:
        from sharding.words import counted

        print(f"removed {counted(len(removed), 'file')}")


@app.command()
def schema(
    spec: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(metavar="[SPEC.yaml]", help="With a spec: the schema of its output."),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Every field of a spec as JSON Schema; with a spec, the Arrow schema of its output."""
    if spec is None:
        from jobs.spec import JobSpec

        print_json(JobSpec.model_json_schema())
        return
    from jobs.prepare import prepare_job

    print(prepare_job(_load(spec, overrides)).plan.output_schema.to_string(show_schema_metadata=False))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="FOLDER", help="Model folder with pytorch_model.bin.")],
    target: Annotated[Path, typer.Argument(metavar="NEW_FOLDER", help="Where the safetensors folder goes.")],
    as_json: Json = False,
) -> None:
    """Make a safetensors folder of one with PyTorch weights. The pickle is read, never executed."""
    from workers.model.convert import convert_model

    tensors = convert_model(source, target)
    if as_json:
        print_json({"folder": str(target), "tensors": tensors})
    else:
        from sharding.words import counted

        print(f"wrote {target}: {counted(tensors, 'tensor')} as safetensors")


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine and this build offer, and what is wrong, in words that can be acted on."""
    from jobs.doctor import examine
    from jobs.render import render_findings

    findings = examine()
    show(findings, render_findings, as_json=as_json)
    sys.exit(5 if any(finding.status == "problem" for finding in findings) else 0)


@app.command("shell-init")
def shell_init(shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish")]) -> None:
    """A shell function that makes `jobs submit ...` reach this program and leaves the builtin `jobs` alone."""
    from jobs.shell import own_program, shell_function

    print(shell_function(shell, own_program()), end="")


def _output_of(argument: str) -> str:
    """An output folder as it is; of a spec, its output."""
    if argument.endswith((".yaml", ".yml")):
        from jobs.spec import load_spec

        return load_spec(argument).output.path
    return argument
