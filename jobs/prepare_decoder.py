"""Before anything starts, for tasks that run a decoder's head: prompts, chat, sampling, endings, schema and labels.

Every `auto` is decided here, each with a note for the plan; what cannot work is an error here and not in a worker.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.errors import SpecError
from jobs.identity import CHAT_DATE
from jobs.spec import JobSpec
from jobs.spec_task import TaskSpec
from sharding.errors import InputError, RecordRow
from sharding.words import counted
from workers.config import DecoderConfig, Sampling, TaskConfig
from workers.engine.base import EngineInfo
from workers.engine.fake import END_ID
from workers.generation.sampling import EndTokens, decide_sampling, find_end_tokens
from workers.model.decoder import DecoderFiles
from workers.model.resolve import ModelLocation
from workers.worker import load_constraint, load_decoder_files, load_prompt_tokenizer

_MOST_SCHEMA_BYTES = 1 << 20
_PROBE = "what the assistant says"


def decide_decoder(
    spec: JobSpec, model: ModelLocation, info: EngineInfo, planned: Mapping[str, str]
) -> tuple[DecoderConfig, list[str]]:
    """Decide what a decoder task asks.

    Args:
        spec: A job whose task is `by_likelihood`.
        model: Where the model is.
        info: What it is.
        planned: Identity of the plan that is on disk already, empty without one: its day goes before today.

    Returns:
        The settings, and notes for the plan.

    Raises:
        InputError: Settings, model and schema do not fit together.
        ModelError: A file of the model is broken, or asks for what is not supported.
    """
    task = spec.task
    files = load_decoder_files(model.source, model.path)
    messages, notes = _decide_chat(task, files)
    decoder = DecoderConfig(
        messages=messages,
        chat_template_args=json.dumps(task.chat_template_args, ensure_ascii=False, sort_keys=True),
        chat_date=None,
        answer=task.answer,
        labels=task.labels or (),
        json_schema=read_schema(task),
        sampling=None,
        max_positions=info.max_positions,
    )
    if not messages and task.chat_template_args:
        raise InputError("task.chat_template_args has no meaning without a chat: `task.chat`")
    turn_end = None
    if messages and files is not None:
        decoder, turn_end, said = _look_at_template(decoder, files, planned)
        notes += said
    if task.kind == "generate":
        sampling, said = _decide_sampling(task, files, info, turn_end)
        decoder = replace(decoder, sampling=sampling)
        notes += said
    return decoder, notes


def check_decoder(model: ModelLocation, task: TaskConfig, info: EngineInfo) -> list[str]:
    """Build once, try, and throw away what every worker will build: prompts' tokenizer and schema.

    Returns:
        Notes for the plan.

    Raises:
        InputError: A label gives no token or leaves no room, the model has no chat template, the schema cannot be used.
    """
    load_prompt_tokenizer(model.source, model.path, task)
    constraint = load_constraint(model.source, model.path, task, info.vocab_size)
    doubt = None if constraint is None else constraint.rehearse()
    return [] if doubt is None else [f"json_schema: {doubt}"]


def _decide_chat(task: TaskSpec, files: DecoderFiles | None) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """Messages as role and template; none where the text is the prompt as it stands."""
    has_template = files is not None and files.chat_template is not None
    if task.messages is not None or task.chat is True:
        if not has_template:
            raise InputError(
                f"the model has no chat template: `task.{'messages' if task.messages is not None else 'chat'}`",
                hint="use an instruction-tuned model, or give the whole prompt as task.text with task.chat: false",
            )
        assert files is not None
        if task.messages is not None:
            messages = tuple((message.role, message.content) for message in task.messages)
            return messages, [f"prompt: {counted(len(messages), 'message')} through {files.chat_template_place}"]
        return _as_user_message(task), [f"prompt: task.text as a user message through {files.chat_template_place}"]
    if not task.text:
        return (), ["prompt: none; the likelihood of task.answer alone"]
    if task.chat == "auto" and task.kind == "generate" and has_template:
        assert files is not None
        return _as_user_message(task), [
            f"prompt: task.text as a user message through {files.chat_template_place} (task.chat: false for plain text)"
        ]
    return (), ["prompt: task.text as it stands, no chat template"]


def _as_user_message(task: TaskSpec) -> tuple[tuple[str, str], ...]:
    text = task.text or ""
    bare = "{" not in text and "}" not in text
    return (("user", "{" + text + "}" if bare else text),)


def _look_at_template(
    decoder: DecoderConfig, files: DecoderFiles, planned: Mapping[str, str]
) -> tuple[DecoderConfig, str | None, list[str]]:
    """Fix the day that the template sees, and find the token by which it ends the assistant's turn."""
    from workers.tokenization.prompt_tokenizer import make_chat_template

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    before = planned.get(CHAT_DATE, str(None))
    dated = replace(decoder, chat_date=today if before == str(None) else before)
    template = make_chat_template(files, dated)
    notes: list[str] = []
    if template.asks_for_date:
        decoder = dated
        notes.append(f"the chat template sees {dated.chat_date} as today, on resume too")
    try:
        text = template.render([("user", "hello"), ("assistant", _PROBE)], add_generation_prompt=False)
    except RecordRow:
        return decoder, None, notes
    return decoder, _leading_special_token(files, text.rpartition(_PROBE)[2]), notes


def _leading_special_token(files: DecoderFiles, text: str) -> str | None:
    """The special token that a text begins with, white space aside."""
    added = files.tokenizer.get_added_tokens_decoder()
    encoding = files.tokenizer.encode(text, add_special_tokens=False)
    for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
        if token in added and added[token].special:
            content: str = added[token].content
            return content
        if text[start:stop].strip():
            return None
    return None


def _decide_sampling(
    task: TaskSpec, files: DecoderFiles | None, info: EngineInfo, turn_end: str | None
) -> tuple[Sampling, list[str]]:
    asked = task.generation
    if files is None:
        ends = EndTokens((END_ID, *(token for token in asked.stop_tokens if isinstance(token, int))), "end tokens: 1")
    else:
        ends = find_end_tokens(files, info.vocab_size, turn_end=turn_end, stop_tokens=_stop_tokens(task, files))
    sampling, notes = decide_sampling(asked.model_dump(), files, ends)
    if sampling.beams > 1 and task.json_schema is not None:
        raise InputError(f"beam search cannot follow a JSON schema: `task.generation.beams: {sampling.beams}`")
    return sampling, notes


def _stop_tokens(task: TaskSpec, files: DecoderFiles) -> list[str | int]:
    """Those of the spec, and stop strings that are special tokens: these give no text to look into."""
    added = files.tokenizer.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    return [*task.generation.stop_tokens, *(text for text in task.generation.stop if text in special)]


def read_schema(task: TaskSpec) -> str | None:
    """The schema as JSON text.

    Raises:
        SpecError: No such file, too large, or no JSON object.
    """
    from workers.generation.constrain import canonical_schema

    if task.json_schema is None:
        return None
    if not isinstance(task.json_schema, str):
        return canonical_schema(task.json_schema)
    path = Path(task.json_schema)
    try:
        if path.stat().st_size > _MOST_SCHEMA_BYTES:
            raise SpecError(f"task.json_schema names a file above {_MOST_SCHEMA_BYTES} bytes: `{path}`")
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"task.json_schema names a file that is not readable JSON ({error}): `{path}`") from error
    if not isinstance(content, dict):
        raise SpecError(f"task.json_schema names a file that holds no JSON object: `{path}`")
    return canonical_schema(content)
