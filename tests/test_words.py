"""Messages count in singular and plural."""

from __future__ import annotations

import pyarrow as pa
import pytest
from job_files import JobFiles

from jobs.doctor import examine
from jobs.facts import Facts
from jobs.placement import place_replicas
from sharding.errors import InfrastructureError, InputError
from sharding.tensor import ModelSizes, check_world
from sharding.words import counted
from workers.resources.limits import CgroupLimits


@pytest.mark.parametrize(
    ("count", "told"),
    [
        (0, "0 rows"),
        (1, "1 row"),
        (1.0, "1 row"),
        (1.5, "1.5 rows"),
        (2, "2 rows"),
        (1000, "1,000 rows"),
        (1_234_567, "1,234,567 rows"),
    ],
)
def test_one_is_singular_and_everything_else_plural(count: float, told: str) -> None:
    assert counted(count, "row") == told


def test_room_for_one_of_a_kind_is_told_in_the_singular() -> None:
    node = {"CPU": 1.0, "GPU": 0.0}
    with pytest.raises(InfrastructureError) as caught:
        place_replicas([node], 1, 1, 1, device="cuda")
    assert str(caught.value) == "1 replica of 1 CPU and 1 GPU does not fit; the nodes have: `1 CPU, 0 GPUs`"
    with pytest.raises(InfrastructureError, match=r"^2 replicas of 1 CPU and 0 GPUs do not fit;"):
        place_replicas([node], 2, 1, 0, device="cpu")


def test_a_machine_of_one_core_and_one_granted_cpu_is_told_in_the_singular() -> None:
    told = {finding.what for finding in examine(Facts(cores=1, affinity=1))}
    assert "1 core, all usable" in told
    granted = Facts(cores=8, affinity=8, limits=CgroupLimits(cpu_quota=1.0))
    assert any("grants 1 CPU of 8 visible ones" in finding.what for finding in examine(granted))


def test_a_model_of_one_key_value_head_is_told_in_the_singular() -> None:
    sizes = ModelSizes.from_config(
        {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 6, "vocab_size": 9}
    )
    with pytest.raises(InputError, match="model of 2 heads, 1 key/value head and intermediate size 6"):
        check_world(sizes, 5)


def test_a_job_of_one_row_speaks_of_one_row(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a text"]}))
    spec = str(files.spec_file())
    plan = files.run("plan", spec)
    assert plan.code == 0, plan.stderr
    assert "1 file, 1 row," in plan.stdout
    assert "in 1 sampled row;" in " ".join(plan.stdout.replace("│", " ").split())
    assert files.run("submit", spec).code == 0
    assert "1 of 1 row committed, 1 of 1 shard, 0 bad rows" in files.run("status", "out").stdout
    assert "removed 0 files" in files.run("gc", "out").stdout
