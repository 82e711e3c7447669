"""JSON Schema as a mask over the next token, by the llguidance library. Samples nothing and parses no output.

White space between JSON's parts is bounded, or a model could fill every text with it. What a schema asks for and the
library does not know, and a schema that nothing of finite size satisfies, is an error before a job starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import llguidance
from tokenizers import Tokenizer

from sharding.errors import InputError, RecordRow
from workers.completions import CONSTRAINT_FAILED
from workers.satisfiable import is_satisfiable

_OPTIONS: llguidance._lib.JsonCompileOptions = {"whitespace_pattern": "[ \\n\\t]{1,16}"}


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
        try:
            tokens = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(end_ids))
        except ValueError as error:
            raise InputError(
                f"task.json_schema cannot constrain a tokenizer of this kind: `{_line(str(error))}`"
            ) from error
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        except ValueError as error:
            raise _refused(str(error), schema) from error
        self._first = llguidance.LLMatcher(tokens, grammar, log_level=0)
        self._end_ids = frozenset(end_ids)
        self._mask_bytes = 4 * -(-vocab_size // 32)  # the library's own has a word more where they fill the last one
        if not self._first.is_error():
            probe = self._first.deep_copy()
            probe.compute_bitmask()  # finds what cannot even begin
            if not probe.is_error():
                return
            raise _refused(probe.get_error(), schema)
        raise _refused(self._first.get_error(), schema)

    def begin(self) -> TextConstraint:
        """The constraint of one new text."""
        return TextConstraint(self._first.deep_copy(), self._end_ids, self._mask_bytes)


class TextConstraint:
    """Follows one text; what `candle_py.Generator.add` takes as `constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, end_ids: frozenset[int], mask_bytes: int) -> None:
        self._matcher = matcher
        self._mask_bytes = mask_bytes
        self._end_ids = end_ids

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
        if ids and not self._matcher.consume_tokens(ids):
            raise RecordRow(f"{CONSTRAINT_FAILED}: `{_line(self._matcher.get_error())}`")
        if len(ids) < len(new_ids) or (self._matcher.is_stopped() and not self._matcher.is_error()):
            return None
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RecordRow(f"{CONSTRAINT_FAILED}: `{_line(self._matcher.get_error())}`")
        return bits[: self._mask_bytes]


def canonical_schema(schema: Mapping[str, Any]) -> str:
    """A schema as JSON text: the order of keys stays, because it is the order of a text's properties."""
    return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))


def _refused(reason: str, schema: str) -> InputError:
    shown = schema if len(schema) <= 200 else schema[:197] + "..."
    return InputError(f"task.json_schema cannot be used, {_line(reason)}: `{shown}`")


def _line(text: str) -> str:
    return " ".join(text.split("\n<state>")[0].split())[:200]
