"""JSON Schema as a mask over the next token, by the llguidance library. Samples nothing and parses no output.

White space between JSON's parts is bounded, or a model could fill every text with it. What a schema asks for and the
library does not know, and a schema that nothing of finite size satisfies, is an error before a job starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
import numpy as np
from tokenizers import Tokenizer

from sharding.errors import InputError, RecordRow
from workers.generation.completions import CONSTRAINT_FAILED
from workers.generation.satisfiable import is_satisfiable

_OPTIONS: llguidance._lib.JsonCompileOptions = {"whitespace_pattern": "[ \\n\\t]{1,16}"}
_MOST_MULTIPLE = 1_000_000
_DATA_KEYS = frozenset({"enum", "const", "default", "examples"})
_REHEARSED_TEXTS = 4
_REHEARSED_TOKENS = 64


class SchemaConstraint:
    """One schema compiled for one model; gives each text a mask of its own.

    Args:
        schema: JSON text of a schema.
        tokenizer: The model's.
        vocab_size: Rows of the model's embedding; masks have as many bits, rounded up to 32.
        end_ids: Tokens that end a text, at least one.

    Raises:
        InputError: The schema cannot be compiled, nothing satisfies it, or the tokenizer is of a kind that cannot be
            constrained.
    """

    def __init__(self, schema: str, tokenizer: Tokenizer, vocab_size: int, end_ids: Sequence[int]) -> None:
        if not end_ids:
            raise InputError(
                "task.json_schema needs an end token, and the model's files name none: `task.generation.stop_tokens`"
            )
        parsed = json.loads(schema)
        if not is_satisfiable(parsed):
            raise _refused("nothing of finite size satisfies it", schema)
        if (factor := _largest_multiple(parsed)) > _MOST_MULTIPLE:
            raise _refused(f"a multipleOf beyond {_MOST_MULTIPLE} takes the library minutes: {factor}", schema)
        try:
            self._tokens = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(end_ids))
        except ValueError as error:
            raise InputError(
                f"task.json_schema cannot constrain a tokenizer of this kind: `{_line(str(error))}`"
            ) from error
        try:
            self._grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        except ValueError as error:
            raise _refused(str(error), schema) from error
        self._schema = schema
        self._end_ids = frozenset(end_ids)
        self._mask_bytes = 4 * -(-vocab_size // 32)  # the library's own has a word more where they fill the last one
        self._first = self._compile()
        self._generation = 0
        probe = self._first.deep_copy()
        if not self._first.is_error():
            probe.compute_bitmask()  # finds what cannot even begin
        if probe.is_error():
            raise _refused(probe.get_error(), schema)

    def begin(self) -> TextConstraint:
        """The constraint of one new text."""
        return TextConstraint(self, self._first.deep_copy(), self._generation, self._end_ids, self._mask_bytes)

    def begin_alone(self, generation: int) -> llguidance.LLMatcher:
        """A matcher that shares nothing with other texts, for one whose shared matcher failed.

        Copies of a matcher share an automaton that grows with every text and may only become so large. Texts that begin
        later get a new one, too.

        Args:
            generation: Of the matcher that failed.
        """
        if generation == self._generation:
            self._first = self._compile()
            self._generation += 1
        return self._compile()

    def rehearse(self) -> str | None:
        """Follow a few texts of allowed tokens chosen by a fixed rule, to find an automaton that grows without bounds.

        Returns:
            What went wrong with some of them, or None.

        Raises:
            InputError: It went wrong with each of them.
        """
        failures = []
        for text in range(_REHEARSED_TEXTS):
            try:
                self._rehearse_one(np.random.default_rng(text))
            except RecordRow as error:
                failures.append(str(error))
        if len(failures) == _REHEARSED_TEXTS:
            raise _refused(failures[0].partition(": `")[2].removesuffix("`"), self._schema)
        return f"{len(failures)} of {_REHEARSED_TEXTS} rehearsed texts failed, {failures[0]}" if failures else None

    def _rehearse_one(self, random: np.random.Generator) -> None:
        constraint = self.begin()
        new: list[int] = []
        for _ in range(_REHEARSED_TOKENS):
            mask = constraint.mask(new)
            if mask is None:
                return
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
            going_on = allowed[~np.isin(allowed, list(self._end_ids))]
            if not len(going_on):
                return
            new = [int(random.choice(going_on))]

    def _compile(self) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokens, self._grammar, log_level=0)


class TextConstraint:
    """Follows one text; what `candle_py.Generator.add` takes as `constraint`.

    No text fails because of others: when the matcher that it shares with them does, it is followed again from its
    beginning by one of its own, and only that one's failure counts.
    """

    def __init__(
        self,
        schema: SchemaConstraint,
        matcher: llguidance.LLMatcher,
        generation: int,
        end_ids: frozenset[int],
        mask_bytes: int,
    ) -> None:
        self._schema = schema
        self._matcher = matcher
        self._generation: int | None = generation
        self._mask_bytes = mask_bytes
        self._end_ids = end_ids
        self._taken: list[int] = []

    def mask(self, new_ids: Sequence[int]) -> bytes | None:
        """Tokens that may come next.

        Args:
            new_ids: Tokens chosen since the last call.

        Returns:
            One bit per token, uint32 words, little endian; None when the text is complete.

        Raises:
            RecordRow: A token was chosen that the mask forbade, or the library gave up on a text too intricate.
        """
        ids = [token for token in new_ids if token not in self._end_ids]
        self._taken += ids
        ended = len(ids) < len(new_ids)
        try:
            return self._next(ids, ended=ended)
        except RecordRow:
            if self._generation is None:
                raise
        self._matcher, self._generation = self._schema.begin_alone(self._generation), None
        return self._next(self._taken, ended=ended)

    def _next(self, ids: Sequence[int], *, ended: bool) -> bytes | None:
        if ids and not self._matcher.consume_tokens(list(ids)):
            raise RecordRow(f"{CONSTRAINT_FAILED}: `{_line(self._matcher.get_error())}`")
        if ended or (self._matcher.is_stopped() and not self._matcher.is_error()):
            return None
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RecordRow(f"{CONSTRAINT_FAILED}: `{_line(self._matcher.get_error())}`")
        return bits[: self._mask_bytes]


def canonical_schema(schema: Mapping[str, Any]) -> str:
    """A schema as JSON text: the order of keys stays, because it is the order of a text's properties."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _largest_multiple(schema: Any) -> int:
    """The largest `multipleOf` in a schema that is a whole number and no power of ten; 0 without one."""
    largest, waiting = 0, [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            waiting += [value for key, value in node.items() if key not in _DATA_KEYS]
            factor = node.get("multipleOf")
            if isinstance(factor, int | float) and factor == factor // 1 and str(int(factor)).strip("0") != "1":
                largest = max(largest, int(factor))
    return largest


def _refused(reason: str, schema: str) -> InputError:
    shown = schema if len(schema) <= 200 else schema[:197] + "..."
    return InputError(f"task.json_schema cannot be used, {_line(reason)}: `{shown}`")


def _line(text: str) -> str:
    return " ".join(text.split("\n<state>")[0].split())[:200]
