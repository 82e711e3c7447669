"""The spec: what is accepted, and what a mistake is told."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from jobs.errors import ExitCode, SpecError, exit_code_of
from jobs.spec import JobSpec, load_spec, parse_spec
from sharding.errors import NotFoundError

GOOD = """\
name: docs
task:
  kind: embed
  text: doc
model:
  source: fake:8
input:
  path: data/*.parquet
output:
  path: out/docs
"""


@pytest.fixture
def write(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return path

    return write


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        load_spec(path, overrides)
    assert exit_code_of(caught.value) == ExitCode.USAGE
    return str(caught.value)


def test_a_minimal_spec_gets_every_default(write) -> None:  # type: ignore[no-untyped-def]
    spec = load_spec(write(GOOD))
    assert spec.input.path == ("data/*.parquet",)
    assert spec.sharding.target_rows == 20_000
    assert spec.sharding.target_bytes == 128 << 20
    assert spec.errors.max_row_error_rate == 0.05
    assert spec.backend == "ray"


def test_every_config_in_the_tree_is_a_valid_spec() -> None:
    folder = Path(__file__).parent.parent / "configs"
    files = sorted(folder.glob("*.yaml"))
    assert files
    for file in files:
        assert load_spec(file).name


def test_an_unknown_key_names_its_line_and_the_nearest_known_key(write) -> None:  # type: ignore[no-untyped-def]
    message = refused(write(GOOD.replace("model:", "modle:")))
    assert "job.yaml:5" in message
    assert "did you mean `model`" in message


def test_an_unknown_key_in_a_section_names_the_nearest_key_of_that_section(write) -> None:  # type: ignore[no-untyped-def]
    message = refused(write(GOOD.replace("  text:", "  txet:")))
    assert "did you mean `text`" in message
    assert "task.txet" in message


def test_a_number_for_a_string_names_line_key_and_value(write) -> None:  # type: ignore[no-untyped-def]
    message = refused(write(GOOD.replace("text: doc", "text: 3")))
    assert "job.yaml:4" in message
    assert "task.text" in message
    assert "`3`" in message


def test_a_wrong_choice_lists_the_choices(write) -> None:  # type: ignore[no-untyped-def]
    message = refused(write(GOOD.replace("kind: embed", "kind: embedd")))
    assert "'classify'" in message
    assert "embedd" in message


def test_tabs_are_refused_with_their_line(write) -> None:  # type: ignore[no-untyped-def]
    assert "job.yaml:3" in refused(write(GOOD.replace("  kind", "\tkind")))


@pytest.mark.parametrize(
    ("good", "bad", "word"),
    [
        ("text: doc", "text: &anchor doc", "anchor"),
        ("text: doc", "text: *nothing", "nothing"),
        ("text: doc", "text: !!python/object/apply:os.system ['true']", "tags"),
        ("text: doc", "text: !local doc", "tags"),
    ],
)
def test_anchors_aliases_and_tags_are_refused_with_their_line(  # type: ignore[no-untyped-def]
    write, good: str, bad: str, word: str
) -> None:
    message = refused(write(GOOD.replace(good, bad)))
    assert ":4" in message
    assert word in message


def test_a_python_object_tag_runs_nothing(write, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    target = tmp_path / "touched"
    refused(write(GOOD.replace("text: doc", f"text: !!python/object/apply:os.mkdir ['{target}']")))
    assert not target.exists()


def test_ten_megabytes_of_yaml_are_refused_by_size(write) -> None:  # type: ignore[no-untyped-def]
    assert str(10 << 20) in refused(write("#" * (10 << 20)))


def test_deep_nesting_is_refused_without_a_crash(write) -> None:  # type: ignore[no-untyped-def]
    assert "nested" in refused(write("a: " + "[" * 900 + "]" * 900))


@pytest.mark.parametrize("word", ["2024-13-45", "2024-01-01", "0x_", "12:30:45", "yes", "9" * 5000])
def test_an_unquoted_word_that_is_no_plain_number_is_text(write, word: str) -> None:  # type: ignore[no-untyped-def]
    assert load_spec(write(GOOD.replace("path: out/docs", f"path: {word}"))).output.path == word


def test_thousands_of_brackets_are_refused_at_once(write) -> None:  # type: ignore[no-untyped-def]
    assert "nested" in refused(write("a: " + "[" * 100_000))


def test_an_override_is_taken_to_its_last_character(write) -> None:  # type: ignore[no-untyped-def]
    overrides = ["output.path=out #1", "task.prompt=query: ", "input.path=*.parquet", "name=%x: y"]
    spec = load_spec(write(GOOD), overrides)
    assert (spec.output.path, spec.task.prompt, spec.input.path, spec.name) == (
        "out #1",
        "query: ",
        ("*.parquet",),
        "%x: y",
    )


def test_one_mistake_is_one_line_in_yamls_own_words(write) -> None:  # type: ignore[no-untyped-def]
    message = refused(write(GOOD + "workers: {replicas: true}\n"))
    assert message.count("\n") == 0
    assert "`true`" in message


def test_a_template_with_a_lost_brace_is_a_spec_mistake_with_its_line(write) -> None:  # type: ignore[no-untyped-def]
    assert "job.yaml:4" in refused(write(GOOD.replace("text: doc", 'text: "{doc"')))


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just text", "3"])
def test_what_is_no_mapping_is_refused(write, text: str) -> None:  # type: ignore[no-untyped-def]
    assert "mapping" in refused(write(text))


def test_a_repeated_key_is_refused(write) -> None:  # type: ignore[no-untyped-def]
    assert "twice" in refused(write(GOOD + "name: other\n"))


def test_all_problems_are_told_at_once(write) -> None:  # type: ignore[no-untyped-def]
    message = refused(write(GOOD.replace("text: doc", "text: 3").replace("name: docs", "nmae: docs")))
    assert "nmae" in message
    assert "task.text" in message
    assert "missing" in message


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        load_spec(tmp_path / "no.yaml")
    assert exit_code_of(caught.value) == ExitCode.NOT_FOUND


def test_overrides_replace_single_fields(write) -> None:  # type: ignore[no-untyped-def]
    spec = load_spec(
        write(GOOD), ["sharding.target_bytes=2MiB", "input.path=[a, b]", "task.max_tokens=64", "task.normalize=false"]
    )
    assert spec.sharding.target_bytes == 2 << 20
    assert spec.input.path == ("a", "b")
    assert spec.task.max_tokens == 64
    assert spec.task.normalize is False


@pytest.mark.parametrize("field", ["batch.cache_bytes", "sharding.target_bytes"])
def test_bytes_beyond_any_machine_are_refused(write, field: str) -> None:  # type: ignore[no-untyped-def]
    assert load_spec(write(GOOD), [f"{field}=1EiB"])
    for size in ("2EiB", "8EiB", "99999999999999999999"):
        assert refused(write(GOOD), f"{field}={size}").startswith(f"command line: {field}: ")


@pytest.mark.parametrize(
    "field",
    [
        "batch.rows",
        "batch.cache_bytes",
        "model.tensor_parallel",
        "sharding.target_rows",
        "task.max_tokens",
        "workers.gpus",
    ],
)
def test_a_number_that_is_too_large_is_told_with_the_greatest(write, field: str) -> None:  # type: ignore[no-untyped-def]
    greatest = 1 << 60
    assert load_spec(write(GOOD), [f"{field}={greatest}"])
    section, name = field.split(".")
    for number in (greatest + 1, 10**23, 10**3000):
        told = refused(write(GOOD), f"{field}={number}")
        assert told.startswith(
            f"command line: {field}: input should be less than or equal to {greatest}: `{number}"[:90]
        )
        data = yaml.safe_load(GOOD)
        data.setdefault(section, {})[name] = number
        assert f"less than or equal to {greatest}" in refused(write(yaml.safe_dump(data)))


def test_a_seed_may_be_any_number_of_63_bits(write) -> None:  # type: ignore[no-untyped-def]
    seed = (1 << 63) - 1
    settings = ["task.kind=generate", f"task.generation.seed={seed}"]
    assert load_spec(write(GOOD), settings).task.generation.seed == seed
    settings[1] = f"task.generation.seed={seed + 1}"
    assert f"less than {seed + 1}" in refused(write(GOOD), *settings)


@pytest.mark.parametrize("override", ["nonsense", "=3", "task.=3", "name.x=3"])
def test_a_malformed_override_is_refused(write, override: str) -> None:  # type: ignore[no-untyped-def]
    refused(write(GOOD), override)


def test_a_mistake_of_the_command_line_is_not_laid_on_a_line_of_the_file(write) -> None:  # type: ignore[no-untyped-def]
    path = write(GOOD)
    for override in ("sharding.target_rows=0", "output.path=", "input.path=[]", "input.path=", "backend=spark"):
        told = refused(path, override)
        assert told.startswith(f"command line: {override.partition('=')[0]}: "), told
        assert "tuple" not in told
        assert "validation" not in told
    assert refused(path, "task.kin=embed").startswith("command line: unknown key (did you mean `kind`?)")
    other = refused(write(GOOD.replace("name:", "nmae:")), "sharding.target_rows=0").splitlines()
    assert [line.partition(": ")[0] == "command line" for line in other].count(True) == 1
    assert len(other) > 1


def test_an_override_of_an_unknown_field_names_the_nearest(write) -> None:  # type: ignore[no-untyped-def]
    assert "did you mean `replicas`" in refused(write(GOOD), "workers.replcas=3")


def test_a_query_belongs_to_rerank_alone(write) -> None:  # type: ignore[no-untyped-def]
    assert "query" in refused(write(GOOD), "task.query=q")
    assert "query" in refused(write(GOOD), "task.kind=rerank")
    assert load_spec(write(GOOD), ["task.kind=rerank", "task.query=q"]).task.query == "q"


def test_a_spec_from_plain_data_equals_one_from_a_file(write) -> None:  # type: ignore[no-untyped-def]
    data = {
        "name": "docs",
        "task": {"kind": "embed", "text": "doc"},
        "model": {"source": "fake:8"},
        "input": {"path": "data/*.parquet"},
        "output": {"path": "out/docs"},
    }
    assert parse_spec(data) == load_spec(write(GOOD)) == JobSpec.model_validate(data)


def test_every_field_says_what_it_is_for() -> None:
    schema = JobSpec.model_json_schema()
    sections = schema["$defs"].values()
    missing = [
        f"{section['title']}.{name}"
        for section in sections
        for name, field in section["properties"].items()
        if not field.get("description")
    ]
    assert missing == []
