"""The documentation against the code: fields, verbs, exit codes and examples are real, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from jobs.errors import ExitCode
from jobs.spec import JobSpec, load_spec, parse_spec
from jobs.verbs import PROGRAM, VERBS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "k8s").glob("*.md")])
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def fields(model: type[BaseModel], prefix: str = "") -> dict[str, object]:
    """Dotted name of every leaf field of a spec, and its default (`...` where there is none)."""
    found: dict[str, object] = {}
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= fields(kind, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = ... if field.is_required() else field.default
    return found


def table_of_fields() -> dict[str, str]:
    """First and second column of every table row of the spec's page whose first cell is a field."""
    rows = re.findall(r"^\| `([a-z_.]+)` \|([^|]*)\|", (ROOT / "docs/spec.md").read_text(), re.MULTILINE)
    assert len({name for name, _ in rows}) == len(rows)
    return {name: default.strip() for name, default in rows}


def test_the_page_of_the_spec_has_every_field_and_no_other() -> None:
    assert set(table_of_fields()) == set(fields(JobSpec))


def test_the_page_of_the_spec_gives_the_defaults_in_force() -> None:
    expected = {}
    for name, default in fields(JobSpec).items():
        if default is ...:
            expected[name] = ""
        elif default == 128 << 20:
            expected[name] = "`128MiB`"
        else:
            expected[name] = f"`{'null' if default is None else default}`"
    assert table_of_fields() == expected


def test_the_page_of_exit_codes_has_every_code() -> None:
    cells = re.findall(r"^\| ([\d, ]+) \|", (ROOT / "docs/exit-codes.md").read_text(), re.MULTILINE)
    assert {int(code) for cell in cells for code in cell.split(",")} == {int(code) for code in ExitCode}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if not link.startswith(("http://", "https://", "#")):
            assert (page.parent / link.split("#")[0]).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_shown_is_a_verb(page: Path) -> None:
    for word in re.findall(rf"\b{PROGRAM} ([a-z][a-z-]+)", page.read_text()):
        assert word in VERBS, word


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_whole_spec_shown_is_valid(page: Path) -> None:
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
        parse_spec(yaml.safe_load(block))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_make_target_shown_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {"wheel-cuda"}
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", page.read_text(), re.MULTILINE):
        assert target in targets, target


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_every_config_is_a_valid_spec(config: Path) -> None:
    assert load_spec(config).name
