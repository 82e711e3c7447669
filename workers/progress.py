"""How far a running shard is, for other threads to read. Counts, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """How far the running shard is; read by other threads."""

    shard: int = -1
    rows_before: int = 0
    tokens: int = 0
    share: float = 0.0
    window_rows: int = 0

    def begin(self, shard: int) -> None:
        """Begin a shard."""
        self.shard, self.rows_before, self.tokens, self.share, self.window_rows = shard, 0, 0, 0.0, 0

    @property
    def rows(self) -> int:
        """Rows of finished windows, and of the running one the share that its finished batches are."""
        return self.rows_before + int(self.window_rows * self.share)

    def window(self, rows: int, tokens: int) -> Callable[[int], None]:
        """Begin a window; the function returned counts the tokens of each finished batch."""
        self.share, self.window_rows = 0.0, rows

        def advance(batch_tokens: int) -> None:
            self.tokens += batch_tokens
            self.share = min(1.0, self.share + batch_tokens / tokens)

        return advance

    def add(self, *, rows: int = 0, tokens: int = 0) -> None:
        """Count rows and tokens that are finished, where rows flow rather than come in windows."""
        self.rows_before += rows
        self.tokens += tokens

    def finish_window(self) -> None:
        """The window's rows are finished, those without any token too."""
        self.rows_before += self.window_rows
        self.share, self.window_rows = 0.0, 0
