"""From new tokens to text while they come: finds stop strings across tokens, and breaks no character. Knows no rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workers.tokenization.codec import TextCodec

REPLACEMENT = "\ufffd"
_MOST_CHARACTER_BYTES = 4
_SPARE_TOKENS = 8


class TextStream:
    """The text of one completion.

    The text is what the tokenizer makes of all tokens together, special ones left out, as the reference decodes it. It
    ends before the first stop string, and never in half a character: bytes at the end that make none are left out.

    Stop strings are looked for after each token in the text of the last tokens only, as many as the longest of them
    can span (a token that gives text gives at least one byte), so the work for a token does not grow with the text.

    Args:
        codec: The model's tokenizer.
        stop: Strings that end the text.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str] = ()) -> None:
        self._codec = codec
        self._stop = tuple(stop)
        self._ids: list[int] = []
        longest = max((len(text.encode()) for text in stop), default=0)
        self._span = longest + _MOST_CHARACTER_BYTES + _SPARE_TOKENS
        self._found = False

    def push(self, token: int) -> bool:
        """Take the next token.

        Returns:
            Whether the text now holds a stop string and ends.
        """
        if not self._codec.is_special(token):
            self._ids.append(token)
            if self._stop:
                tail = self._codec.decode(self._ids[-self._span :])
                self._found = self._found or any(text in tail for text in self._stop)
        return self._found

    def text(self) -> str:
        """The text so far."""
        whole = _whole_characters(self._codec.decode, self._ids)
        if not self._found:
            return whole
        places = [place for text in self._stop if (place := whole.find(text)) >= 0]
        return whole[: min(places)] if places else whole


def _whole_characters(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> str:
    """Text of tokens less an unfinished character at the end.

    Some decoders spoil the finished characters before it as well, so the text without the last few tokens is looked at
    too, and the longest one that ends well is taken.
    """
    text = decode(ids)
    if not text.endswith(REPLACEMENT):
        return text
    candidates = [text.rstrip(REPLACEMENT)]
    for dropped in range(1, min(_MOST_CHARACTER_BYTES, len(ids) + 1)):
        shorter = decode(ids[: len(ids) - dropped])
        if not shorter.endswith(REPLACEMENT):
            candidates.append(shorter)
            break
    return max(candidates, key=len)
