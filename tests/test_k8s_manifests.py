"""The manifests: they parse, their commands are commands of ours, their specs are valid, their mounts have volumes."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.errors import ExitCode
from jobs.spec import JobSpec, load_spec
from jobs.verbs import PROGRAM, VERBS

FOLDER = Path(__file__).resolve().parent.parent / "k8s"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def nested(value: object, key: str) -> Iterator[Any]:
    """Every value that stands under `key`, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == key:
                yield inner
            yield from nested(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from nested(inner, key)


def commands(path: Path) -> list[list[str]]:
    found: list[list[str]] = []
    for document in documents(path):
        found += [list(command) for command in nested(document, "command")]
        found += [shlex.split(line) for line in nested(document, "entrypoint")]
    return found


def specs(path: Path, tmp_path: Path) -> dict[str, JobSpec]:
    loaded = {}
    for document in documents(path):
        for name, text in document.get("data", {}).items():
            (tmp_path / name).write_text(text)
            loaded[name] = load_spec(tmp_path / name)
    return loaded


def pods(path: Path) -> list[dict[str, Any]]:
    return [
        template["spec"]
        for document in documents(path)
        for template in nested(document, "template")
        if "containers" in template["spec"]
    ]


def test_there_are_manifests_for_a_cron_job_and_a_ray_job() -> None:
    kinds = {document["kind"] for path in MANIFESTS for document in documents(path)}
    assert {"CronJob", "RayJob"} <= kinds


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_command_is_one_of_ours_on_a_spec_that_is_mounted(path: Path, tmp_path: Path) -> None:
    known = specs(path, tmp_path)
    assert commands(path)
    for program, verb, spec, *rest in commands(path):
        assert program in ("jobs", PROGRAM)
        assert verb in VERBS
        assert Path(spec).name in known
        assert Path(spec).parent == Path("/configs")
        assert rest == []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_line_for_a_shell_does_not_say_jobs(path: Path) -> None:
    for document in documents(path):
        for line in nested(document, "entrypoint"):
            assert shlex.split(line)[0] == PROGRAM


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_mount_has_its_volume_and_every_volume_is_mounted(path: Path) -> None:
    assert pods(path)
    names = {document["metadata"]["name"] for document in documents(path) if document["kind"] == "ConfigMap"}
    for pod in pods(path):
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == volumes
        assert {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume} <= names


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_container_has_limits_and_room_for_rays_store(path: Path) -> None:
    for pod in pods(path):
        for container in pod["containers"]:
            assert {"cpu", "memory"} <= set(container["resources"]["limits"])
            assert "/dev/shm" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_the_cron_job_restarts_only_what_a_restart_can_cure() -> None:
    (cron,) = (document for document in documents(FOLDER / "cronjob.yaml") if document["kind"] == "CronJob")
    (values,) = nested(cron, "values")
    curable = {ExitCode.COMPLETE, ExitCode.INFRASTRUCTURE, ExitCode.INTERRUPTED, ExitCode.TERMINATED}
    assert set(values) == {int(code) for code in ExitCode} - curable


def test_the_ray_job_uses_the_cluster_it_is_given(tmp_path: Path) -> None:
    (spec,) = specs(FOLDER / "rayjob.yaml", tmp_path).values()
    assert spec.ray.address == "auto"
