"""Chat prompts of whole jobs, and what generation_config.json has to say: obeyed, told, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from decoder_folders import CHATML, byte_tokenizer, write_decoder
from job_files import JobFiles

from jobs import run_job
from jobs.prepare import PreparedJob, prepare_job
from jobs.prepare_decoder import decide_decoder
from sharding.errors import CandelabraError, InputError
from workers.config import DecoderConfig, Sampling
from workers.worker import load_prompt_tokenizer

TASK: dict[str, Any] = {"kind": "generate", "text": "doc"}
CHAT: dict[str, Any] = {
    "kind": "generate",
    "messages": [
        {"role": "system", "content": "Answer {{briefly}}."},
        {"role": "user", "content": "About {doc}:"},
    ],
}


def prepared(files: JobFiles, source: str, task: dict[str, Any], **changes: Any) -> PreparedJob:
    if not (files.root / "in.parquet").exists():
        files.write_input(pa.table({"doc": ["cats", "dogs"], "n": [1, 2]}))
    return prepare_job(files.spec(model__source=source, task=task, **changes))


def decoder_of(files: JobFiles, source: str, task: dict[str, Any]) -> DecoderConfig:
    found = prepared(files, source, task).worker_config.task.decoder
    assert found is not None
    return found


def sampling_of(files: JobFiles, source: str, **generation: Any) -> Sampling:
    found = decoder_of(files, source, {**TASK, "generation": generation}).sampling
    assert found is not None
    return found


def prompts(files: JobFiles, source: str, task: dict[str, Any], *texts: str) -> list[str]:
    """Prompts as the model would read them, special tokens written out."""
    chosen = prepared(files, source, task).worker_config.task
    tokens = load_prompt_tokenizer(source, Path(), chosen).tokenize_columns(
        [list(texts) if template.columns else [template.literals[0]] * len(texts) for template in chosen.templates()]
    )
    tokenizer = byte_tokenizer()
    bounds = zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)
    return [tokenizer.decode(tokens.ids[a:b].tolist(), skip_special_tokens=False) for a, b in bounds]


def test_messages_go_through_the_models_template_and_no_token_is_added(files: JobFiles, tmp_path: Path) -> None:
    template = "{{ bos_token }}" + CHATML
    tokenizer = byte_tokenizer(start=True)
    source = write_decoder(tmp_path / "model", tokenizer, template=template, bos_token="<s>")
    chosen = prepared(files, source, CHAT).worker_config.task
    found = load_prompt_tokenizer(source, Path(), chosen).tokenize_columns([["Answer {briefly}."], ["cats"]])
    text = tokenizer.decode(found.ids.tolist(), skip_special_tokens=False)
    assert text == (
        "<s><|im_start|>system\nAnswer {briefly}.<|start of a turn|>\n<|im_start|>user\ncats<|start of a turn|>\n"
        "<|im_start|>assistant\n"
    )
    assert found.ids.tolist().count(0) == 1
    assert [t.source for t in chosen.templates()] == ["Answer {{briefly}}.", "About {doc}:"]


def test_a_whole_job_renders_columns_into_messages(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": ["cats", None, "a {brace}"], "n": [1, 2, 3]}))
    source = write_decoder(tmp_path / "model", template=CHATML)
    task = {"kind": "generate", "messages": [{"role": "user", "content": "{doc} and {n}"}]}
    run_job(files.spec(model__source=source, task=task, errors__max_row_error_rate=1.0))
    rows = files.rows().to_pylist()
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert "doc" in rows[1]["error"]
    written = CHATML_OF("a {brace} and 3")
    assert rows[2]["n_tokens"] == len(byte_tokenizer().encode(written).ids)


def CHATML_OF(content: str) -> str:  # noqa: N802 - a template, written out
    return f"<|im_start|>user\n{content}<|start of a turn|>\n<|im_start|>assistant\n"


def test_plain_text_is_the_users_message_of_a_chat_model_unless_the_spec_says_no(
    files: JobFiles, tmp_path: Path
) -> None:
    chat = write_decoder(tmp_path / "chat", template=CHATML)
    base = write_decoder(tmp_path / "base", byte_tokenizer(start=True))
    assert prompts(files, chat, TASK, "cats") == [CHATML_OF("cats")]
    assert prompts(files, chat, {**TASK, "text": "On {doc}."}, "cats") == [CHATML_OF("cats")]
    assert prompts(files, chat, {**TASK, "chat": False}, "cats") == ["cats"]
    assert prompts(files, base, TASK, "cats") == ["<s>cats"]
    assert "user message" in str(prepared(files, chat, TASK).plan.notes)
    assert "as it stands" in str(prepared(files, base, TASK).plan.notes)
    for task in (CHAT, {**TASK, "chat": True}):
        with pytest.raises(InputError, match="no chat template"):
            prepared(files, base, task)


def test_the_templates_own_file_goes_before_the_key_and_default_before_other_names(
    files: JobFiles, tmp_path: Path
) -> None:
    source = write_decoder(tmp_path / "model", template="from the key")
    assert prompts(files, source, TASK, "x") == ["from the key"]
    (tmp_path / "model" / "chat_template.jinja").write_text("from the file")
    assert prompts(files, source, TASK, "x") == ["from the file"]
    (tmp_path / "model" / "chat_template.jinja").unlink()
    path = tmp_path / "model" / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "the default"}]
    path.write_text(json.dumps({"chat_template": named}))
    assert prompts(files, source, TASK, "x") == ["the default"]
    path.write_text(json.dumps({"chat_template": [{**entry, "name": entry["template"]} for entry in named]}))
    with pytest.raises(InputError, match="none is `default`"):
        prepared(files, source, TASK)


@pytest.mark.parametrize(
    "trouble",
    [
        "{{ raise_exception('not with me') }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    ],
)
def test_a_templates_trouble_with_one_row_is_that_rows_error(files: JobFiles, tmp_path: Path, trouble: str) -> None:
    template = "{% if 'bad' in messages[0].content %}" + trouble + "{% endif %}" + CHATML
    files.write_input(pa.table({"doc": ["good", "bad", "fine"]}))
    source = write_decoder(tmp_path / "model", template=template)
    run_job(files.spec(model__source=source, task=TASK, errors__max_row_error_rate=1.0))
    rows = files.rows().to_pylist()
    assert [row["error"] is None for row in rows] == [True, False, True]
    assert "the chat template fails" in rows[1]["error"]
    assert rows[1]["finish_reason"] == "error"


def test_arguments_reach_the_template_and_are_pinned(files: JobFiles, tmp_path: Path) -> None:
    template = CHATML + "{% if enable_thinking is false %}no thoughts {{ more | length }}{% endif %}"
    source = write_decoder(tmp_path / "model", template=template)
    task = {**TASK, "chat_template_args": {"enable_thinking": False, "more": [1, 2]}}
    assert prompts(files, source, task, "x")[0].endswith("no thoughts 2")
    assert "enable_thinking" in prepared(files, source, task).plan.identity["task.chat_template_args"]


def test_a_chat_that_is_too_long_loses_the_end_of_its_longest_message_and_no_mark(
    files: JobFiles, tmp_path: Path
) -> None:
    source = write_decoder(tmp_path / "model", template=CHATML)
    tokenizer = byte_tokenizer()
    task = {**TASK, "max_tokens": 40}
    long = "The quick brown fox jumps over the lazy dog. " * 2000
    found = prompts(files, source, task, long, "short")
    body = found[0].removeprefix("<|im_start|>user\n").removesuffix("<|start of a turn|>\n<|im_start|>assistant\n")
    assert long.startswith(body)
    assert len(body) > 20
    assert 38 <= len(tokenizer.encode(found[0]).ids) <= 40
    assert found[1] == CHATML_OF("short")
    files.write_input(pa.table({"doc": [long, "short", "x" * (20 << 20)]}))
    run_job(files.spec(model__source=source, task=task))
    assert files.rows()["truncated"].to_pylist() == [True, False, True]
    spec = files.spec(
        model__source=source,
        task={**task, "truncate": "error"},
        errors__max_row_error_rate=1.0,
        output__path=str(files.out("refused")),
    )
    run_job(spec)
    rows = files.rows("refused").to_pylist()
    assert [row["finish_reason"] for row in rows] == ["error", rows[1]["finish_reason"], "error"]
    allowed = "the prompt has more tokens than task.max_tokens allows"
    assert rows[0]["error"].startswith(f"{allowed}: `")
    assert rows[0]["error"].endswith(" of 40`")
    assert rows[2]["error"] == f"{allowed}: `more than 40 of 40`"
    spec = files.spec(
        model__source=source,
        task={**task, "max_tokens": 6},
        errors__max_row_error_rate=1.0,
        output__path=str(files.out("head")),
    )
    run_job(spec)
    head = len(tokenizer.encode(CHATML_OF("")).ids)
    assert {row["error"] for row in files.rows("head").to_pylist()} == {
        f"{allowed} even without its longest message: `{head} of 6`"
    }


def test_a_template_that_asks_for_the_day_sees_the_planned_one_on_resume_too(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": ["cats"] * 3}))
    source = write_decoder(tmp_path / "model", template="{{ strftime_now('%Y-%m-%d') }}" + CHATML)
    spec = files.spec(model__source=source, task=TASK)
    run_job(spec)
    plan = json.loads((files.out() / "_candelabra" / "plan.json").read_text())
    day = plan["identity"]["task.chat_date"]
    assert any(day in note for note in plan["notes"])
    assert run_job(spec).computed_rows == 0
    ready = prepare_job(spec)
    decoder, notes = decide_decoder(spec, ready.model, ready.info, {"task.chat_date": "2020-01-02"})
    assert decoder.chat_date == "2020-01-02"
    assert any("2020-01-02" in note for note in notes)


def test_a_finished_chat_job_submitted_again_has_nothing_to_do(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": ["cats"] * 3}))
    source = write_decoder(tmp_path / "model", template=CHATML)
    assert run_job(files.spec(model__source=source, task=CHAT)).computed_rows == 3
    assert run_job(files.spec(model__source=source, task=CHAT)).computed_rows == 0


def test_the_files_values_hold_where_the_spec_is_silent(files: JobFiles, tmp_path: Path) -> None:
    values = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05}
    file = {**values, "repetition_penalty": 1.05, "max_new_tokens": 99, "eos_token_id": [2, 4]}
    source = write_decoder(tmp_path / "model", generation=file)
    found = sampling_of(files, source)
    assert (found.temperature, found.top_k, found.top_p, found.min_p) == (0.7, 20, 0.8, 0.05)
    assert (found.repetition_penalty, found.max_new_tokens, found.stop_ids) == (1.05, 99, (2, 4))
    found = sampling_of(files, source, temperature=0.2, top_k=0, max_new_tokens=5, repetition_penalty=1.0)
    assert (found.temperature, found.top_k, found.top_p, found.max_new_tokens) == (0.2, None, 0.8, 5)
    found = sampling_of(files, source, defaults="none")
    assert (found.temperature, found.top_k, found.repetition_penalty, found.max_new_tokens) == (0, None, 1, 256)
    assert found.stop_ids == (2, 4)


def test_do_sample_false_is_greedy_whatever_else_the_file_says(files: JobFiles, tmp_path: Path) -> None:
    for number, file in enumerate(
        ({"do_sample": False, "temperature": 0.7, "top_k": 5}, {"temperature": 0.7}, {}, None)
    ):
        found = sampling_of(files, write_decoder(tmp_path / str(number), generation=file))
        assert (found.temperature, found.top_k) == (0, None)
    assert sampling_of(files, write_decoder(tmp_path / "b", generation={"num_beams": 3, "do_sample": True})).beams == 3


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer_config", "expected"),
    [
        ({"eos_token_id": [4, 2]}, {"eos_token_id": 1}, {"eos_token": "<pad>"}, (4, 2)),
        ({"eos_token_id": 4}, {"eos_token_id": 1}, {}, (4,)),
        ({"temperature": 1.0}, {"eos_token_id": [1, 2]}, {"eos_token": "<mask>"}, (1, 2)),
        (None, {"eos_token_id": None}, {"eos_token": {"content": "</s>"}}, (2,)),
        (None, {"eos_token_id": None}, {}, ()),
    ],
)
def test_end_tokens_come_from_the_first_file_that_names_any(
    files: JobFiles, tmp_path: Path, generation: Any, config: Any, tokenizer_config: Any, expected: tuple[int, ...]
) -> None:
    source = write_decoder(tmp_path / "model", generation=generation, config=config, **tokenizer_config)
    assert sampling_of(files, source).stop_ids == expected
    notes = str(prepared(files, source, TASK).plan.notes)
    assert ("end tokens: none" in notes) == (expected == ())


def test_the_templates_end_of_turn_and_the_specs_tokens_end_a_text_too(files: JobFiles, tmp_path: Path) -> None:
    source = write_decoder(tmp_path / "model", template=CHATML)
    assert sampling_of(files, source).stop_ids == (2, 6)
    assert sampling_of(files, source, stop_tokens=["<mask>", 77]).stop_ids == (2, 6, 4, 77)
    assert sampling_of(files, source, stop="<mask>").stop_ids == (2, 6, 4)


def test_an_end_token_outside_the_vocabulary_is_told(files: JobFiles, tmp_path: Path) -> None:
    with pytest.raises(CandelabraError, match="99999"):
        sampling_of(files, write_decoder(tmp_path / "model", generation={"eos_token_id": 99999}))


@pytest.mark.parametrize(
    ("key", "value", "harmless"),
    [
        ("no_repeat_ngram_size", 3, 0),
        ("bad_words_ids", [[1]], None),
        ("guidance_scale", 1.5, 1.0),
        ("suppress_tokens", [1, 2], []),
        ("forced_eos_token_id", 2, None),
    ],
)
def test_what_the_file_asks_for_and_is_not_supported_is_named(
    files: JobFiles, tmp_path: Path, key: str, value: Any, harmless: Any
) -> None:
    source = write_decoder(tmp_path / "model", generation={key: value})
    with pytest.raises(CandelabraError, match=key) as caught:
        sampling_of(files, source)
    assert "defaults: none" in str(caught.value.hint)
    assert sampling_of(files, source, defaults="none").temperature == 0
    sampling_of(files, write_decoder(tmp_path / "fine", generation={key: harmless}))


def test_a_value_that_is_no_number_is_told(files: JobFiles, tmp_path: Path) -> None:
    with pytest.raises(CandelabraError, match="temperature"):
        sampling_of(files, write_decoder(tmp_path / "model", generation={"do_sample": True, "temperature": "hot"}))


def test_a_stop_string_over_two_tokens_ends_texts_of_a_job_and_is_cut_off(files: JobFiles, tmp_path: Path) -> None:
    files.write_input(pa.table({"doc": [f"question {i}" for i in range(80)]}))
    source = write_decoder(tmp_path / "model")
    run_job(files.spec(model__source=source, task=TASK))
    before = [row["text"] for row in files.rows().to_pylist()]
    text = max(before, key=len)
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    task = {**TASK, "generation": {"stop": [stop, "no such thing"]}}
    run_job(files.spec(model__source=source, task=task, output__path=str(files.out("stopped"))))
    rows = files.rows("stopped").to_pylist()
    assert [row["text"] for row in rows] == [one.split(stop)[0] for one in before]
    chosen = rows[before.index(text)]
    assert (chosen["finish_reason"], "\ufffd" in chosen["text"][-1:]) == ("stop", False)
