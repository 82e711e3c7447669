"""The front: spec, driver, backends, command line. `from jobs import load_spec, run_job`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.driver import run_job
    from jobs.report import JobReport
    from jobs.spec import JobSpec, load_spec

__all__ = ["JobReport", "JobSpec", "load_spec", "run_job"]

_HOMES = {"JobReport": "report", "JobSpec": "spec", "load_spec": "spec", "run_job": "driver"}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used: `jobs --help` imports none of what they need."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jobs' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"jobs.{_HOMES[name]}"), name)
