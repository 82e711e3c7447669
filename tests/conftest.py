"""Shared fixtures. Ray's switches are set here, before any test imports it, so that all processes agree on them."""

from __future__ import annotations

import os

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

from pathlib import Path

import pytest
from job_files import JobFiles
from s3_server import faulty_s3, s3_bucket, s3_server
from torch_pickles import torch_names

__all__ = ["faulty_s3", "files", "s3_bucket", "s3_server", "torch_names"]


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    """An empty folder with helpers to put a dataset and a spec into it."""
    return JobFiles(tmp_path)
