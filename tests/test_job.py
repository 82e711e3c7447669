"""Whole jobs on the local backend with the fake engine: rows, order, errors, resume, repair."""

from __future__ import annotations

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from job_files import JobFiles, leftovers, part_digests, sample_table

from jobs import JobReport, JobSpec, run_job
from jobs.errors import ExitCode, exit_code_of
from sharding.errors import CandelabraError, DriftError, InputError, NotFoundError


def run(spec: JobSpec, **options: bool) -> JobReport:
    return run_job(spec, **options)  # type: ignore[arg-type]


def test_every_input_row_is_in_the_output_once_and_in_order(files: JobFiles) -> None:
    table = sample_table(1234)
    files.write_input(table, row_group_size=200)
    report = run(files.spec())
    assert (report.state, report.exit_code) == ("complete", 0)
    out = files.rows()
    assert out["id"].to_pylist() == list(range(1234))
    assert out["doc"].to_pylist() == table["doc"].to_pylist()
    assert (files.out() / "_SUCCESS").is_file()
    assert leftovers(files.out()) == []


def test_output_columns_and_types_are_the_documented_ones(files: JobFiles) -> None:
    files.write_input(sample_table(50))
    run(files.spec())
    schema = files.rows().schema
    assert schema.names == ["id", "doc", "tag", "embedding", "n_tokens", "truncated", "error"]
    assert schema.field("embedding").type == pa.list_(pa.field("element", pa.float32()), 8)
    assert [schema.field(name).type for name in ("n_tokens", "truncated", "error")] == [
        pa.int32(),
        pa.bool_(),
        pa.string(),
    ]


def test_null_text_becomes_a_row_error_and_its_neighbours_are_untouched(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a b", None, "c d", None]}))
    run(files.spec(errors__max_row_error_rate=1.0))
    rows = files.rows().to_pylist()
    assert [row["error"] is None for row in rows] == [True, False, True, False]
    assert "null text" in rows[1]["error"]
    assert "doc" in rows[1]["error"]
    assert rows[1]["embedding"] is None
    assert rows[1]["n_tokens"] is None
    assert np.isclose(np.linalg.norm(rows[0]["embedding"]), 1)
    files.write_input(pa.table({"doc": ["a b", "c d"]}), "alone.parquet")
    run(files.spec(input__path=str(files.root / "alone.parquet"), output__path=str(files.out("alone"))))
    alone = files.rows("alone").to_pylist()
    assert [rows[0]["embedding"], rows[2]["embedding"]] == [row["embedding"] for row in alone]


def test_nan_from_the_model_becomes_that_rows_error_alone(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["fine", "some nan here", "fine too"]}))
    run(files.spec(errors__max_row_error_rate=1.0))
    rows = files.rows().to_pylist()
    assert [row["error"] for row in rows][::2] == [None, None]
    assert "not finite" in rows[1]["error"]
    assert rows[1]["embedding"] is None
    assert rows[1]["n_tokens"] == 4


def test_a_row_the_model_refuses_is_isolated_from_its_batch(files: JobFiles) -> None:
    texts = [f"text {i}" for i in range(200)]
    texts[77] = "crash now"
    texts[133] = "another crash"
    files.write_input(pa.table({"doc": texts}))
    run(files.spec())
    errors = files.rows()["error"].to_pylist()
    assert [i for i, error in enumerate(errors) if error is not None] == [77, 133]


def test_equal_texts_get_equal_results_wherever_they_stand(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": [f"text {i % 7}" for i in range(5000)]}))
    run(files.spec(sharding__target_rows=5000))
    out = files.rows()
    vectors = np.stack(out["embedding"].to_numpy(zero_copy_only=False))
    assert len(np.unique(vectors, axis=0)) == 7
    report = json.loads((files.out() / "_candelabra/report.json").read_text())
    assert report["tokens"] == 7 * 3


@pytest.mark.parametrize("rows", [0, 1, 99, 100, 101])
def test_any_number_of_rows_gives_a_sealed_output_with_the_full_schema(files: JobFiles, rows: int) -> None:
    files.write_input(sample_table(rows))
    assert run(files.spec()).exit_code == 0
    out = files.rows()
    assert out.num_rows == rows
    assert out.schema.names[-4:] == ["embedding", "n_tokens", "truncated", "error"]


def test_the_error_column_is_one_type_in_all_parts(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a"] * 100 + [None] * 100}))
    run(files.spec(errors__max_row_error_rate=1.0))
    schemas = {pq.read_schema(path) for path in files.out().glob("*.parquet")}
    assert len(schemas) == 1


def test_submitting_a_finished_job_again_computes_nothing_and_changes_nothing(files: JobFiles) -> None:
    files.write_input(sample_table(500))
    run(files.spec())
    before = {path: path.stat().st_mtime_ns for path in files.out().glob("*.parquet")}
    report = run(files.spec())
    assert report.exit_code == 0
    assert report.computed_rows == 0
    assert {path: path.stat().st_mtime_ns for path in files.out().glob("*.parquet")} == before


def test_a_part_does_not_depend_on_the_batch_budget(files: JobFiles) -> None:
    files.write_input(sample_table(500))
    digests = []
    for number, budget in enumerate((16, 333, 100_000)):
        run(files.spec(batch__budget_tokens=budget, output__path=str(files.out(f"o{number}"))))
        digests.append(part_digests(files.out(f"o{number}")))
    assert digests[0] == digests[1] == digests[2]


def test_too_many_bad_rows_end_with_exit_1_no_success_and_all_rows_written(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a", None] * 100}))
    report = run(files.spec())
    assert report.exit_code == ExitCode.FAILED_ROWS
    assert report.state == "too_many_row_errors"
    assert files.rows().num_rows == 200
    assert not (files.out() / "_SUCCESS").exists()


def test_a_job_of_only_bad_rows_still_writes_every_row(files: JobFiles) -> None:
    files.write_input(pa.table({"id": list(range(250)), "doc": pa.nulls(250, pa.string())}))
    report = run(files.spec())
    assert report.exit_code == 1
    assert files.rows()["id"].to_pylist() == list(range(250))
    assert files.rows()["error"].null_count == 0


def test_retry_failed_computes_only_bad_rows_and_keeps_every_byte_of_the_good_ones(files: JobFiles) -> None:
    files.write_input(pa.table({"id": list(range(300)), "doc": [f"t {i}" if i != 150 else "nan" for i in range(300)]}))
    run(files.spec())
    before = part_digests(files.out())
    good = files.rows().filter(pa.compute.is_null(files.rows()["error"]))
    report = run(files.spec(), retry_failed=True)
    assert report.exit_code == 0
    assert report.computed_tokens == 2
    assert report.row_errors == 1
    assert part_digests(files.out()) == before
    assert files.rows().filter(pa.compute.is_null(files.rows()["error"])).equals(good)
    assert leftovers(files.out()) == []


def test_a_missing_column_is_told_before_anything_starts(files: JobFiles) -> None:
    files.write_input(sample_table(10))
    with pytest.raises(InputError, match="`nope`") as caught:
        run(files.spec(task__text="nope"))
    assert exit_code_of(caught.value) == ExitCode.USAGE
    assert not files.out().exists()


def test_a_column_without_text_is_told_with_its_type(files: JobFiles) -> None:
    files.write_input(sample_table(10))
    with pytest.raises(InputError, match="int64"):
        run(files.spec(task__text="id"))


def test_a_column_with_a_results_name_is_refused_unless_it_may_be_overwritten(files: JobFiles) -> None:
    files.write_input(pa.table({"doc": ["a"], "embedding": [3], "error": ["old"]}))
    with pytest.raises(InputError, match="embedding, error"):
        run(files.spec())
    assert not files.out().exists()
    run(files.spec(output__on_conflict="overwrite"))
    assert files.rows().schema.names == ["doc", "embedding", "n_tokens", "truncated", "error"]
    assert files.rows()["error"].to_pylist() == [None]


def test_the_text_column_itself_may_be_left_out_or_overwritten(files: JobFiles) -> None:
    files.write_input(pa.table({"id": [1], "doc": ["a b"]}))
    run(files.spec(input__columns=["id"]))
    assert files.rows().schema.names[0] == "id"
    assert "doc" not in files.rows().schema.names
    assert files.rows()["n_tokens"].to_pylist() == [3]


@pytest.mark.parametrize("place", [".", "sub", "in.parquet"])
def test_an_output_that_holds_or_lies_in_the_input_is_refused(files: JobFiles, place: str) -> None:
    files.write_input(sample_table(10), "data/in.parquet")
    with pytest.raises(InputError, match=r"output\.path"):
        run(files.spec(input__path=str(files.root / "data"), output__path=str(files.root / "data" / place)))


def test_an_input_that_is_not_there_is_not_found(files: JobFiles) -> None:
    with pytest.raises(NotFoundError) as caught:
        run(files.spec())
    assert exit_code_of(caught.value) == ExitCode.NOT_FOUND


def test_a_changed_source_file_is_drift_and_names_both_versions(files: JobFiles) -> None:
    files.write_input(sample_table(300))
    run(files.spec())
    (files.out() / "_SUCCESS").unlink()
    files.write_input(sample_table(300, seed=2))
    with pytest.raises(DriftError, match=r"in\.parquet") as caught:
        run(files.spec())
    assert exit_code_of(caught.value) == ExitCode.DRIFT


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"task__prompt": "query: "}, "prompt"),
        ({"task__dimensions": 4}, "dimensions"),
        ({"model__source": "fake:9"}, "model"),
        ({"sharding__target_rows": 99}, "target_rows"),
        ({"output__column": "vector"}, "schema"),
    ],
)
def test_a_changed_spec_is_drift_and_shows_both_values(files: JobFiles, change: dict[str, object], field: str) -> None:
    files.write_input(sample_table(300))
    run(files.spec())
    digests = part_digests(files.out())
    with pytest.raises(DriftError, match=field):
        run(files.spec(**change))
    assert part_digests(files.out()) == digests


def test_settings_that_decide_no_byte_may_change_between_runs(files: JobFiles) -> None:
    files.write_input(sample_table(300))
    run(files.spec())
    report = run(
        files.spec(name="other", batch__budget_tokens=5, workers__max_attempts=9, errors__max_row_error_rate=1)
    )
    assert report.exit_code == 0


def test_a_stray_parquet_file_that_came_since_the_plan_is_named_before_sealing(files: JobFiles) -> None:
    files.write_input(sample_table(10, null_every=0))
    run(files.spec())
    (files.out() / "_SUCCESS").unlink()
    files.write_input(sample_table(3), "out/stray.parquet")
    with pytest.raises(CandelabraError, match="stray"):
        run(files.spec())
    assert not (files.out() / "_SUCCESS").exists()


def test_classify_and_rerank_give_their_columns(files: JobFiles) -> None:
    files.write_input(pa.table({"q": ["a", "b"], "doc": ["c", None]}))
    run(files.spec(task={"kind": "classify", "text": "doc"}, errors__max_row_error_rate=1.0))
    first, second = files.rows().to_pylist()
    assert first["label"] in ("negative", "neutral", "positive")
    assert 1 / 3 <= first["score"] <= 1
    assert (second["label"], second["score"]) == (None, None)
    run(
        files.spec(
            task={"kind": "rerank", "text": "doc", "query": "q"},
            output__path=str(files.out("ranked")),
            errors__max_row_error_rate=1.0,
        )
    )
    first, second = files.rows("ranked").to_pylist()
    assert 0 <= first["score"] <= 1
    assert second["score"] is None


def test_a_failing_read_is_retried_and_then_the_shard_fails_with_its_error_on_disk(files: JobFiles) -> None:
    path = files.write_input(sample_table(400), row_group_size=100, use_dictionary=False, compression="none")
    run(files.spec())
    good = part_digests(files.out())
    stamp = path.stat()
    content = bytearray(path.read_bytes())
    first_page = pq.ParquetFile(path).metadata.row_group(2).column(1).data_page_offset
    content[first_page : first_page + 40] = bytes(40)
    path.write_bytes(content)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    report = run(files.spec(output__path=str(files.out("second"))))
    assert report.exit_code == 1
    assert [failed.shard for failed in report.failed_shards] == [2]
    assert len(part_digests(files.out("second"))) == 3
    assert (files.out("second") / "_candelabra/failures/00002.json").is_file()
    assert not (files.out("second") / "_SUCCESS").exists()
    assert set(part_digests(files.out("second")).values()) < set(good.values())


def test_text_that_is_not_utf8_is_that_rows_error_alone(files: JobFiles) -> None:
    content = b"hello" + b"\xff\xfe\xfd" + b"good"
    offsets = pa.py_buffer(np.array([0, 5, 8, 12], np.int32))
    broken = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(content)])
    files.write_input(pa.table({"doc": broken}))
    for name, text in (("plain", "doc"), ("template", "<{doc}>")):
        spec = files.spec(task__text=text, output__path=str(files.out(name)), errors__max_row_error_rate=1.0)
        assert run(spec).exit_code == 0
        errors = files.rows(name)["error"].to_pylist()
        assert (errors[0], errors[2]) == (None, None)
        assert "UTF-8" in errors[1]


def test_an_output_that_a_glob_of_the_input_would_find_is_refused(files: JobFiles) -> None:
    files.write_input(sample_table(10, null_every=0), "data/a/in.parquet")
    for pattern, refused in (("data/**/*.parquet", True), ("data/*", True), ("data/a/*.parquet", False)):
        spec = files.spec(input__path=str(files.root / pattern), output__path=str(files.root / "data" / "out"))
        if refused:
            with pytest.raises(InputError, match="would find"):
                run(spec)
        else:
            assert run(spec).exit_code == 0


def test_an_output_with_somebody_elses_rows_anywhere_below_is_refused_and_left_as_it_was(files: JobFiles) -> None:
    files.write_input(sample_table(10))
    files.write_input(sample_table(3), "out/sub/old.parquet")
    with pytest.raises(InputError, match=r"old\.parquet"):
        run(files.spec())
    assert [path.name for path in files.out().iterdir()] == ["sub"]


def test_an_output_that_is_a_file_is_refused(files: JobFiles) -> None:
    files.write_input(sample_table(10))
    files.out().write_text("a file")
    with pytest.raises(InputError, match="is a file"):
        run(files.spec())


def test_a_column_named_twice_is_refused(files: JobFiles) -> None:
    with pytest.raises(CandelabraError, match="twice"):
        files.spec(input__columns=["id", "id"])


def test_a_source_rewritten_in_place_while_it_is_read_is_drift_and_publishes_nothing(
    files: JobFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = files.write_input(sample_table(3000, null_every=0), compression="none", use_dictionary=False)
    content = path.read_bytes()

    def rewrite(name: str) -> None:
        if name == "read":
            path.write_bytes(content)

    monkeypatch.setattr("workers.parquet.read.failpoint", rewrite)
    with pytest.raises(DriftError, match=r"in\.parquet"):
        run(files.spec(sharding__target_rows=3000))
    assert part_digests(files.out()) == {}
