"""From a row's texts to what a decoder's head is asked: a prompt, a prompt and its answer, or a prompt per label.

Plain prompts get the start tokens that the tokenizer puts before a text, and no others; what a chat template gives
gets none, because the template writes its own. An answer and labels are tokenised on their own and put behind.

A prompt that is too long loses its end (`truncate: end`): a plain one its last tokens, a chat the last characters of
its longest message, so that the template's own marks stay whole. Answers and labels are kept whole.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from sharding.errors import InputError, RecordRow
from sharding.words import counted
from workers.config import DecoderConfig, TaskConfig
from workers.model.decoder import DecoderFiles
from workers.prompt.chat import ChatTemplate
from workers.tokenization.codec import TextCodec
from workers.tokenization.encode import TOO_LONG, TextTokens, too_long
from workers.tokenization.rows import NO_TOKENS, NULL_TEXT, RowBuilder, TokenRows

NO_ANSWER = "the answer gives no token"
NOTHING_TO_SCORE = "the answer's only token has none before it, so the model says nothing of it"


def make_chat_template(files: DecoderFiles, decoder: DecoderConfig) -> ChatTemplate:
    """The model's template with the task's arguments.

    Raises:
        InputError: The model has none.
        ModelError: It is no valid Jinja.
    """
    if files.chat_template is None:
        raise InputError(
            "the model has no chat template: `task.messages`",
            hint="use an instruction-tuned model, or give the whole prompt as task.text",
        )
    date = None if decoder.chat_date is None else datetime.date.fromisoformat(decoder.chat_date)
    arguments = json.loads(decoder.chat_template_args)
    return ChatTemplate(files.chat_template, tokens=files.special_tokens, arguments=arguments, date=date)


class PromptTokenizer:
    """Makes token rows of a decoder task; see `workers.tokenization.window.Tokenizer`.

    generate gives prompts. score and classify by labels also give `type_ids`: 0 for what is only read, 1 + label for
    the tokens whose likelihood counts; several sequences of one row (one per label) follow each other, and each begins
    where a 0 follows a counted token.

    Args:
        codec: The model's tokenizer.
        task: A task with `decoder` set.
        template: Chat template, where the task has messages.
    """

    prompt_tokens = 0

    def __init__(self, codec: TextCodec, task: TaskConfig, template: ChatTemplate | None = None) -> None:
        assert task.decoder is not None, "a decoder task"
        self.codec = codec
        self._task = task
        self._decoder = task.decoder
        self._template = template
        self._start = [] if self._decoder.messages else list(codec.start_ids)
        self._labels = [found.ids for found in codec.encode(self._decoder.labels, task.max_tokens)]
        empty = [label for label, ids in zip(self._decoder.labels, self._labels, strict=True) if not ids]
        if empty:
            raise InputError(f"a label gives no token: `{empty[0]}`")
        self._check_label_lengths()

    def _check_label_lengths(self) -> None:
        """Beside the longest label, one token of the prompt has to fit."""
        lengths = [len(ids) for ids in self._labels]
        room = self._task.max_tokens - len(self._start)
        if lengths and max(lengths) >= room:
            label = self._decoder.labels[lengths.index(max(lengths))]
            shown = label if len(label) <= 80 else label[:77] + "..."
            raise InputError(
                f"a label of {counted(max(lengths), 'token')} leaves no room for a prompt, "
                f"{self._task.max_tokens_by} allows {self._task.max_tokens} together: `{shown}`",
                hint="shorten the label, or raise task.max_tokens where the model's context is longer",
            )

    def tokenize_columns(self, columns: Sequence[Sequence[str | None]]) -> TokenRows:
        """Token rows; one column for each message or the plain text, and the answer's last."""
        scored = self._decoder.answer is not None
        rows = RowBuilder(with_types=scored or bool(self._labels), with_counts=True)
        answers = columns[-1] if scored else None
        prompts = list(zip(*(columns[:-1] if scored else columns), strict=True))
        tails, cut = self._tails(answers, len(prompts))
        room = self._task.max_tokens - len(self._start)
        rooms = [tail if isinstance(tail, str) else room - max(map(len, tail), default=0) for tail in tails]
        for number, (tail, found) in enumerate(zip(tails, self._prompts(prompts, rooms), strict=True)):
            if answers is not None and answers[number] is None:
                rows.add_error(NULL_TEXT)
            elif isinstance(found, str) or isinstance(tail, str):
                error = str(found)
                rows.add_error(error, truncated=TOO_LONG in error)
            else:
                ids, truncated = found
                self._add(rows, self._start + ids, tail, truncated or number in cut)
        return rows.build()

    def _tails(
        self, answers: Sequence[str | None] | None, rows: int
    ) -> tuple[list[list[list[int]] | str], frozenset[int]]:
        """What follows each prompt (nothing, the answer, or each label; text: its error), and which answers are cut.

        An answer is cut only where there is no prompt: then it is the text whose likelihood is asked for.
        """
        if answers is None:
            return [self._labels] * rows, frozenset()
        room = self._task.max_tokens - len(self._start)
        promptless = not self._decoder.messages and not self._task.text and self._task.truncate == "end"
        tails: list[list[list[int]] | str] = []
        cut: set[int] = set()
        for row, found in enumerate(self.codec.encode([answer or "" for answer in answers], room)):
            if not found.cut and len(found.ids) <= room:
                tails.append([found.ids])
            elif promptless:
                tails.append([self.codec.cut(found.ids, room)])
                cut.add(row)
            else:
                tails.append(self._too_long(found, room, subject="the answer has "))
        return tails, frozenset(cut)

    def _prompts(
        self, prompts: Sequence[Sequence[str | None]], rooms: Sequence[int | str]
    ) -> Iterator[tuple[list[int], bool] | str]:
        """Ids of each prompt and whether it was cut, or the row's error; a room may be an error already."""
        if self._template is None:
            most = max((room for room in rooms if isinstance(room, int)), default=0)
            encoded = iter(self.codec.encode([texts[0] or "" for texts in prompts], max(most, 1)))
            for texts, room in zip(prompts, rooms, strict=True):
                found = next(encoded)
                if texts[0] is None:
                    yield NULL_TEXT
                else:
                    yield room if isinstance(room, str) else self._fitted_plain(found, room)
            return
        for texts, room in zip(prompts, rooms, strict=True):
            try:
                whole = [text for text in texts if text is not None]
                if len(whole) < len(texts):
                    yield NULL_TEXT
                else:
                    yield room if isinstance(room, str) else self._fitted_chat(whole, room)
            except RecordRow as error:
                yield str(error)

    def _fitted_plain(self, found: TextTokens, room: int) -> tuple[list[int], bool] | str:
        if not found.cut and len(found.ids) <= room:
            return found.ids, False
        if self._task.truncate == "error" or room < 1:
            return self._too_long(found, room)
        return self.codec.cut(found.ids, room), True

    def _fitted_chat(self, texts: list[str], room: int) -> tuple[list[int], bool] | str:
        """Render, and render again with less of the longest message until the prompt fits."""
        longest = max(range(len(texts)), key=lambda index: len(texts[index]))

        def render(length: int) -> TextTokens:
            return self._rendered([text[:length] if i == longest else text for i, text in enumerate(texts)], room)

        def attempt(length: int) -> list[int] | None:
            found = render(length)
            return None if found.cut or len(found.ids) > room else found.ids

        most = min(len(texts[longest]), self.codec.hard_chars)
        whole = TextTokens([], cut=True, complete=False)  # beyond the hard bound: nobody counts
        if most == len(texts[longest]):
            whole = render(most)
            if not whole.cut and len(whole.ids) <= room:
                return whole.ids, False
        if self._task.truncate == "error" or room < 1:
            return self._too_long(whole, room)
        fitting = _largest(most, attempt)
        if fitting is None:
            return self._too_long(render(0), room, more=" even without its longest message")
        return fitting, True

    def _rendered(self, contents: Sequence[str], room: int) -> TextTokens:
        """Tokens of a chat; more than `room` where it is longer."""
        assert self._template is not None
        roles = [role for role, _ in self._decoder.messages]
        text = self._template.render(list(zip(roles, contents, strict=True)))
        (found,) = self.codec.encode([text], max(room, 1))
        return found

    def _too_long(self, found: TextTokens, room: int, *, subject: str = "the prompt has ", more: str = "") -> str:
        start = len(self._start)
        beside = " beside the longest label" if self._labels else ""
        if self._decoder.answer is not None and subject.startswith("the prompt"):
            beside = " beside the answer"
        limit = self._task.max_tokens_by
        return too_long([found], max(room, 0) + start, limit, subject=subject, beside=beside + more, more=start)

    def _add(self, rows: RowBuilder, head: list[int], tails: list[list[int]], truncated: bool) -> None:
        if self._decoder.answer is None:
            if not head:
                rows.add_error(NO_TOKENS, truncated=truncated)
                return
            pieces = [head + tail for tail in tails] or [head]
            kinds = [[0] * len(head) + [1 + index] * len(tail) for index, tail in enumerate(tails)] or [[0] * len(head)]
            flat, types = list(chain.from_iterable(pieces)), list(chain.from_iterable(kinds))
            rows.add(flat, types, truncated=truncated, count=len(head))
            return
        whole = head + tails[0]
        read = max(len(head), 1)  # the first token of all has nothing before it: it is read, and does not count
        if not tails[0]:
            rows.add_error(NO_ANSWER)
        elif read >= len(whole):
            rows.add_error(NOTHING_TO_SCORE)
        else:
            rows.add(whole, [0] * read + [1] * (len(whole) - read), truncated=truncated, count=len(whole))


def _largest(most: int, attempt: Callable[[int], list[int] | None]) -> list[int] | None:
    """The result of the largest length up to `most` that an attempt accepts, by halving; None if not even 0 does."""
    best = attempt(0)
    if best is None:
        return None
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        found = attempt(middle)
        if found is None:
            high = middle
        else:
            low, best = middle, found
    return best
