"""How many leading tokens of a cut text are those of the whole text. Tokenises nothing; `encode` asks after each cut.

A cut changes tokens near itself only as far as the tokenizer's parts look at neighbours. Three rules say how far:

    words    The pre-tokenizer reads from left to right and decides each word by the characters in and right behind it
             (BERT's, byte-level, metaspace and the like), and the model sees one word at a time. What comes before the
             last words is final, whatever follows. An added token that the cut splits is as many words as it has
             characters at most, so that many are left out besides.
    spaces   Any other pre-tokenizer (a pattern of the model's own, or none), where no token of the vocabulary goes on
             over a space. Then merges and best paths on both sides of a space are independent, and what comes before
             three whole words at the end is final: no pattern looks ahead that far.
    nothing  Everything else. The whole text has to be tokenised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from tokenizers import Encoding

_LOCAL_PRE_TOKENIZERS = frozenset(
    {"BertPreTokenizer", "Whitespace", "WhitespaceSplit", "Punctuation", "Digits", "CharDelimiterSplit"}
)
_LOCAL_NORMALIZERS = frozenset(
    {"BertNormalizer", "Lowercase", "StripAccents", "Strip", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled"}
    | {"Prepend", "ByteLevel"}
)
_LOCAL_REPLACED = frozenset({" {2,}", r"\s+", r"[\n\r\t]", r"[\r\n]+"})
_CROSSES_SPACE = re.compile("[^ Ġ▁ĊĉčĠ\\s][ Ġ▁]")
_SPARE_WORDS = 2
_TRIES = 16

Rule = Literal["words", "spaces", "nothing"]


@dataclass(frozen=True, slots=True)
class StableTokens:
    """Counts final tokens of a text that was cut at its end.

    Attributes:
        rule: See the module.
        longest_added: Characters of the longest added token.
    """

    rule: Rule
    longest_added: int

    def count(self, encoding: Encoding, cut_text: str) -> int:
        """How many leading tokens the whole text has too, if the end of this one is where it was cut.

        Args:
            encoding: Of the cut text, with offsets and words, without special tokens.
            cut_text: What was tokenised.

        Returns:
            A number of tokens that is safe; 0 when nothing can be said.
        """
        if self.rule == "words":
            return self._before_last_words(encoding)
        if self.rule == "spaces":
            return self._before_last_spaces(encoding, cut_text)
        return 0

    def _before_last_words(self, encoding: Encoding) -> int:
        last = encoding.token_to_word(len(encoding) - 1) if len(encoding) else None
        if last is None:
            return 0
        first = last - _SPARE_WORDS - self.longest_added
        for word in range(first, max(first - _TRIES, -1), -1):
            if (tokens := encoding.word_to_tokens(word)) is not None:
                return tokens[0]
        return 0

    def _before_last_spaces(self, encoding: Encoding, text: str) -> int:
        space = len(text) - self.longest_added
        for passed in range(_SPARE_WORDS + 1 + _TRIES):
            space = _last_word_end(text, space)
            if space <= 0:
                return 0
            if passed > _SPARE_WORDS and (token := encoding.char_to_token(space - 1)) is not None:
                return token + 1
        return 0


def find_stable_rule(content: dict[str, Any]) -> StableTokens:
    """Read off a tokenizer.json which rule holds for its tokenizer.

    Args:
        content: The parsed file.
    """
    added = [str(token.get("content", "")) for token in content.get("added_tokens") or ()]
    longest_added = max(map(len, added), default=0)
    return StableTokens(_rule_of(content), longest_added)


def _rule_of(content: dict[str, Any]) -> Rule:
    if not all(map(_is_local_normalizer, _members(content.get("normalizer"), "normalizers"))):
        return "nothing"
    pre_tokenizers = list(_members(content.get("pre_tokenizer"), "pretokenizers"))
    if pre_tokenizers and all(map(_is_local_pre_tokenizer, pre_tokenizers)) and any(map(_splits, pre_tokenizers)):
        return "words"
    model = content.get("model") or {}
    kind = model.get("type", "BPE" if "merges" in model else "")
    added = {token.get("content") for token in content.get("added_tokens") or ()}
    if kind == "BPE" and not any(map(_CROSSES_SPACE.search, set(model.get("vocab", ())) - added)):
        return "spaces"
    if kind == "Unigram" and not any(_CROSSES_SPACE.search(piece) for piece, _ in model.get("vocab", ())):
        return "spaces"
    return "nothing"


def _members(part: dict[str, Any] | None, key: str) -> Iterable[dict[str, Any]]:
    """A normalizer or pre-tokenizer with its nested ones laid flat."""
    if part is None:
        return
    if part.get("type") != "Sequence":
        yield part
        return
    for member in part.get(key, ()):
        yield from _members(member, key)


def _is_local_normalizer(part: dict[str, Any]) -> bool:
    if part.get("type") != "Replace":
        return part.get("type") in _LOCAL_NORMALIZERS
    pattern = part.get("pattern") or {}
    return "String" in pattern or pattern.get("Regex") in _LOCAL_REPLACED


def _is_local_pre_tokenizer(part: dict[str, Any]) -> bool:
    return part.get("type") in _LOCAL_PRE_TOKENIZERS | {"Metaspace", "ByteLevel"}


def _splits(part: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer makes words; two of them may also stand for a mere renaming of characters."""
    key = {"Metaspace": "split", "ByteLevel": "use_regex"}.get(str(part.get("type")), "")
    return part.get(key) is not False


def _last_word_end(text: str, before: int) -> int:
    """Position of the last space before a position that ends a word, or -1."""
    space = text.rfind(" ", 0, max(before, 0))
    while space > 0 and text[space - 1].isspace():
        space = text.rfind(" ", 0, space)
    return space
