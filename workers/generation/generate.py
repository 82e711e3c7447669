"""Fourth station of a generate shard: prompts through a generator, texts back to every row in order. No files.

Rows flow: as many texts grow at the same time as the generator has places for, and the next one enters as soon as one
ends, whichever window of rows it belongs to. Windows leave in order, each when its last row is finished; only so many
are open at a time, so memory does not grow with the shard.

What a row gets depends on the spec, its prompt and its place in the input: sampled texts have a seed of their own from
(task seed, row, completion), and equal prompts share one text only where it is greedy.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from sharding.errors import RecordRow
from sharding.failpoints import failpoint
from workers.config import AssignedPiece, WorkerConfig
from workers.engine.base import Engine, Event, Generator
from workers.forward import RowResults, count_errors
from workers.generation.completions import Completion, Growing, completion_arrays, failed, row_error
from workers.generation.constrain import SchemaConstraint
from workers.progress import Progress
from workers.results import fact_arrays
from workers.tokenization.codec import TextCodec
from workers.tokenization.window import TextWindow

_OPEN_WINDOWS = 8
_KNOWN_BYTES = 64 << 20
_KNOWN_ENTRY_BYTES = 400
_Slot = tuple[int, int]
"""A row of a window (its distinct text, where texts are greedy) and a completion of it."""


def row_seed(seed: int, row: int, completion: int) -> int:
    """Seed of one text: 64 bits of BLAKE2b over three numbers.

    Args:
        seed: `task.generation.seed`.
        row: Place of the row in the whole input, from 0.
        completion: Which of the row's texts, from 0.
    """
    content = b"".join(part.to_bytes(8, "little") for part in (seed, row, completion))
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


@dataclass(slots=True)
class _Open:
    """A window whose rows are not all finished."""

    window: TextWindow
    done: dict[_Slot, Completion] = field(default_factory=dict)
    missing: int = 0
    tokens: int = 0


@dataclass(slots=True)
class _Request:
    """A text that grows or waits, and the places that it is for."""

    prompt: list[int]
    seed: int
    key: bytes | None
    growing: Growing
    places: list[tuple[_Open, _Slot]]


class TextGenerator:
    """Runs the windows of one shard.

    Args:
        config: The job's settings.
        engine: The loaded model.
        codec: Its tokenizer.
        constraint: The schema that texts fit, or None.
        pieces: The shard's rows, to know each row's place in the input.
        progress: Told rows and tokens as they are finished.
    """

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        codec: TextCodec,
        constraint: SchemaConstraint | None,
        pieces: Sequence[AssignedPiece],
        progress: Progress,
    ) -> None:
        decoder = config.task.decoder
        assert decoder is not None, "a decoder task"
        assert decoder.sampling is not None, "a task of kind generate"
        self._config = config
        self._sampling = decoder.sampling
        self._max_positions = decoder.max_positions
        self._codec = codec
        self._constraint = constraint
        self._pieces = pieces
        self._progress = progress
        self._generator: Generator = engine.generator(
            rows=config.generate_rows, cache_bytes=config.cache_bytes, step_tokens=config.step_tokens
        )
        self._numbers = 0
        self._waiting: deque[_Request] = deque()
        self._growing: dict[int, _Request] = {}
        self._shared: dict[bytes, _Request] = {}
        self._known: dict[bytes, Completion] = {}
        self._known_bytes = 0

    def run(self, windows: Iterator[TextWindow]) -> Iterator[RowResults]:
        """Compute windows; they come out in their order.

        Raises:
            RetryShard: The engine failed.
        """
        opened: deque[_Open] = deque()
        more = True
        while more or opened:
            while more and len(opened) < _OPEN_WINDOWS and len(self._waiting) < self._config.generate_rows:
                window = next(windows, None)
                more = window is not None
                if window is not None:
                    opened.append(self._open(window))
            while opened and not opened[0].missing:
                yield self._results(opened.popleft())
            if self._waiting or self._growing:
                self._step()

    def _open(self, window: TextWindow) -> _Open:
        opened = _Open(window)
        offsets = window.tokens.offsets
        by_position: dict[int, list[int]] = {}
        for row in np.flatnonzero(window.unique >= 0):
            by_position.setdefault(int(window.unique[row]), []).append(int(row))
        for position, rows in by_position.items():
            if position in window.tokens.errors:
                continue
            prompt = window.tokens.ids[offsets[position] : offsets[position + 1]].tolist()
            if self._sampling.greedy:
                self._share(opened, position, prompt)
                continue
            for own in rows:
                place = self._place(window.batch.start + own)
                for completion in range(self._sampling.n):
                    seed = row_seed(self._sampling.seed, place, completion)
                    self._ask(opened, (own, completion), prompt, seed, None)
        return opened

    def _share(self, opened: _Open, position: int, prompt: list[int]) -> None:
        """Ask for a greedy text unless an equal prompt has one, or will have."""
        key = opened.window.keys[position]
        slot = (position, 0)
        if key in self._known:
            opened.done[slot] = self._known[key]
        elif key in self._shared:
            opened.missing += 1
            self._shared[key].places.append((opened, slot))
        else:
            self._ask(opened, slot, prompt, 0, key)

    def _ask(self, opened: _Open, slot: _Slot, prompt: list[int], seed: int, key: bytes | None) -> None:
        growing = Growing(self._codec, self._sampling.stop)
        request = _Request(prompt, seed, key, growing, [(opened, slot)])
        opened.missing += 1
        opened.tokens += len(prompt)
        self._waiting.append(request)
        if key is not None:
            self._shared[key] = request

    def _place(self, position: int) -> int:
        """Place in the whole input of a row of the shard."""
        for piece in self._pieces:
            if position < piece.stop - piece.start:
                return piece.first_row + piece.start + position
            position -= piece.stop - piece.start
        raise IndexError(position)

    def _step(self) -> None:
        while self._waiting and len(self._growing) < 2 * self._config.generate_rows:
            self._add(self._waiting.popleft())
        if not self._growing:
            return
        failpoint("compute")
        for event in self._generator.step():
            request = self._growing.get(event.request_id)
            if request is not None:  # else: stopped before, and told once more
                self._take(request, event)

    def _add(self, request: _Request) -> None:
        self._numbers += 1
        try:
            self._generator.add(
                self._numbers,
                request.prompt,
                self._sampling,
                max_new_tokens=min(self._sampling.max_new_tokens, self._max_positions - len(request.prompt)),
                seed=request.seed,
                constraint=None if self._constraint is None else self._constraint.begin(),
            )
        except RecordRow as error:
            self._finish(request, failed(str(error)))
            return
        self._growing[self._numbers] = request
        self._progress.add(tokens=len(request.prompt))

    def _take(self, request: _Request, event: Event) -> None:
        self._progress.add(tokens=len(event.ids))
        request.places[0][0].tokens += len(event.ids)
        completion = request.growing.take(event)
        if completion is None:
            return
        del self._growing[event.request_id]
        if event.finish is None:
            self._generator.stop(event.request_id)
        self._finish(request, completion)

    def _finish(self, request: _Request, completion: Completion) -> None:
        for opened, slot in request.places:
            opened.done[slot] = completion
            opened.missing -= 1
        if request.key is not None:
            del self._shared[request.key]
            size = _KNOWN_ENTRY_BYTES + 4 * len(completion.text)
            if self._known_bytes + size <= _KNOWN_BYTES:
                self._known[request.key] = completion
                self._known_bytes += size

    def _results(self, opened: _Open) -> RowResults:
        window, n = opened.window, self._sampling.n
        rows = window.batch.rows.num_rows
        n_tokens = np.zeros(rows, np.int32)
        truncated = np.zeros(rows, np.bool_)
        texts: list[Sequence[Completion] | None] = [None] * rows
        errors: list[str | None] = [None] * rows
        lengths = np.diff(window.tokens.offsets.astype(np.int64))
        for row in np.flatnonzero(window.unique >= 0):
            position = int(window.unique[row])
            n_tokens[row] = lengths[position]
            truncated[row] = window.tokens.truncated[position]
            errors[row] = window.tokens.errors.get(position)
            if errors[row] is None:
                first = position if self._sampling.greedy else int(row)
                found = [opened.done[first, completion] for completion in range(n)]
                texts[row], errors[row] = found, row_error(found)
        for bad, error in window.row_errors.items():
            errors[bad] = error
        fresh = [*completion_arrays(texts, n), *fact_arrays(n_tokens, truncated, window.unique >= 0, errors)]
        columns = fresh if window.kept is None else window.kept.merge(fresh)
        self._progress.add(rows=rows)
        return assemble(window, self._config, columns, opened.tokens)


def assemble(window: TextWindow, config: WorkerConfig, columns: list[pa.Array], tokens: int) -> RowResults:
    """Finished rows of a window from its result columns."""
    by_name = dict(zip(config.result_columns, columns, strict=True))
    rows = window.batch.rows
    arrays = [by_name[name] if name in by_name else rows.column(name) for name in config.output_schema.names]
    counts: Counter[str] = count_errors(by_name["error"])
    return RowResults(pa.RecordBatch.from_arrays(arrays, schema=config.output_schema), counts, tokens)
