"""What a worker is told: the job's frozen settings, and one assignment at a time. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from workers.prompt.template import TextTemplate, parse_template

TaskKind = Literal["embed", "classify", "rerank", "generate", "score"]
DeviceKind = Literal["cpu", "cuda"]
LimitName = Literal["task.max_tokens", "the model's context"]
"""What sets the most tokens of a row, in the user's words."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when a text ends, nothing left to `auto`.

    Attributes:
        temperature: 0: greedy.
        top_k: Candidates, or None for all.
        beams: 1: no beam search.
        n: Completions of each row.
        seed: See `workers.generation.generate.row_seed`.
        stop: Strings that end a text and are not part of it.
        stop_ids: Tokens that do.
    """

    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float
    min_p: float
    repetition_penalty: float
    beams: int
    length_penalty: float
    n: int
    seed: int
    stop: tuple[str, ...]
    stop_ids: tuple[int, ...]

    @property
    def greedy(self) -> bool:
        """Equal prompts give equal texts."""
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What a task asks of a decoder's head: prompts, and what is done with them.

    Attributes:
        messages: Role and template of each chat message; empty where `TaskConfig.text` is the prompt as it stands.
        chat_template_args: JSON object passed to the chat template.
        chat_date: Day that the chat template sees as today, ISO 8601, or None where it does not ask.
        answer: Template of the text whose likelihood is computed (score), or None.
        labels: Texts whose likelihoods are compared (classify).
        json_schema: JSON text of the schema that generated texts fit, or None.
        sampling: generate only.
        max_positions: Positions of the model: prompt and new tokens together.
    """

    messages: tuple[tuple[str, str], ...]
    chat_template_args: str
    chat_date: str | None
    answer: str | None
    labels: tuple[str, ...]
    json_schema: str | None
    sampling: Sampling | None
    max_positions: int


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """One task with every `auto` already decided by the plan.

    Attributes:
        kind: What is computed.
        text: A column name, or a template over columns such as `{title}\\n\\n{body}`.
        query: The same for the first text of a pair (rerank), else None.
        activation: `auto` or `none` (classify, rerank).
        prompt: Literal text put before every text; empty for none.
        include_prompt: The prompt's tokens take part in pooling.
        pooling: Pooling modes joined by `+`, or None where the task has none.
        normalize: L2-normalise embeddings.
        dimensions: Cut embeddings to this many leading values first, or None.
        width: Values that the engine gives per row: of the embedding, or logits.
        max_tokens: Most tokens of one row, special tokens included.
        max_tokens_by: What set it, as row errors name it.
        truncate: Cut longer texts at the end, or make them row errors.
        decoder: Set for tasks that run a decoder's head over tokens: generate, score, classify by labels.
    """

    kind: TaskKind
    text: str
    query: str | None
    activation: Literal["auto", "none"]
    prompt: str
    include_prompt: bool
    pooling: str | None
    normalize: bool
    dimensions: int | None
    width: int
    max_tokens: int
    max_tokens_by: LimitName
    truncate: Literal["end", "error"]
    decoder: DecoderConfig | None = None

    def templates(self) -> list[TextTemplate]:
        """Templates of a row's texts, in the order in which `Tokenizer.tokenize_columns` takes them."""
        if self.decoder is None:
            return [parse_template(text) for text in (self.query, self.text) if text is not None]
        if self.decoder.messages:
            found = [parse_template(content, bare_column=False) for _, content in self.decoder.messages]
        else:
            found = [parse_template(self.text) if self.text else parse_template("", bare_column=False)]
        return found if self.decoder.answer is None else [*found, parse_template(self.decoder.answer)]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The model as the plan pinned it: `digest` is checked again on every node."""

    source: str
    revision: str | None
    digest: str
    dtype: str
    device: DeviceKind


@dataclass(frozen=True, slots=True)
class RankConfig:
    """The place of one process among those that hold a model together.

    Attributes:
        rank: Which; 0 reads, decides and writes.
        world: Of how many.
        address: Where rank 0 listens, `host:port`.
        token: Secret of this group.
        timeout_s: How long a silent rank is waited for.
    """

    rank: int
    world: int
    address: str
    token: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Everything a worker needs that does not change from shard to shard.

    Attributes:
        columns: Input columns passed through, in output order.
        output_schema: Schema of every part.
        result_columns: Names of the result columns, in order (see `workers.results`).
        threads: Engine threads, or None for all that the process may use.
        budget_tokens: Most tokens of one batch (a longer single row is a batch of its own).
        step_tokens: generate: most tokens that enter the model in one step.
        generate_rows: generate: most texts that grow at the same time.
        cache_bytes: generate: size of the key/value cache; None leaves it to the engine.
    """

    task: TaskConfig
    model: ModelConfig
    output_uri: str
    columns: tuple[str, ...]
    output_schema: pa.Schema
    result_columns: tuple[str, ...]
    threads: int | None
    budget_tokens: int
    step_tokens: int = 512
    generate_rows: int = 64
    cache_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class AssignedPiece:
    """Rows `start <= row < stop` of one source file, whose version must still be the planned one.

    `first_row` is the place of the file's first row in the whole input.
    """

    path: str
    version: str
    start: int
    stop: int
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class Assignment:
    """One attempt at one shard.

    Attributes:
        generation: 0 for the first result of a shard; each `retry-failed` adds one.
        epoch: Epoch of the driver's lease.
        poison_rows: Rows of the shard that killed workers before; they become row errors unseen.
        probe: Compute only these rows and publish nothing, to find out which of them kill the worker.
        repair_part: Final part whose rows without error are kept (`retry-failed`), or None.
    """

    shard: int
    pieces: tuple[AssignedPiece, ...]
    rows: int
    generation: int
    epoch: int
    attempt: int
    poison_rows: tuple[int, ...] = ()
    probe: tuple[int, int] | None = None
    repair_part: str | None = None


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What a worker says of a finished attempt. `attempt_file` is empty for a probe."""

    shard: int
    generation: int
    attempt: int
    attempt_file: str
    rows: int
    row_errors: int
    error_counts: dict[str, int]
    tokens: int
    size_bytes: int
    sha256: str
    seconds: float
