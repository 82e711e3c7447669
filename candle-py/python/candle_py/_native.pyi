"""The native half of `candle_py`: what the compiled module offers, as types."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, Protocol, TypeAlias, final

from typing_extensions import Buffer

__all__ = [
    "Array",
    "Engine",
    "Event",
    "Generator",
    "NcclCommunicator",
    "TcpCommunicator",
    "capabilities",
    "convert_pickle",
    "gguf_metadata",
    "inspect",
    "inspect_rank",
    "nccl_unique_id",
]

class _NumpyArray(Protocol):
    # NumPy's own stubs tell of the buffer from Python 3.12 on.
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

class _ArrowArray(Protocol):
    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]: ...

# A one-dimensional buffer (a NumPy array, an array.array, a memoryview) or Arrow array of uint32; others are refused.
_UInt32s: TypeAlias = Buffer | _NumpyArray | _ArrowArray

@final
class Array:
    """Rows of float32, `(rows, width)`, read-only; `numpy.asarray` and `pyarrow.array` share its memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """`(rows, width)`."""
    @property
    def dtype(self) -> Literal["float32"]:
        """Always "float32"."""
    @property
    def bad_rows(self) -> list[int]:
        """Indexes of rows that hold NaN or infinity, or that could not be normalised because they are zero."""
    @property
    def __array_interface__(self) -> dict[str, Any]:
        """NumPy's array interface, version 3."""
    def __arrow_c_schema__(self) -> object:
        """The Arrow type, fixed_size_list<element: float32>, as a PyCapsule."""
    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """The Arrow type and data as PyCapsules; a requested type is not followed, as the protocol allows."""
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

@final
class Engine:
    """A loaded model, ready to run on any thread; the GIL is released while it loads and runs.

    Batches are ragged: `ids` holds the token ids of all rows one after the other, `offsets` where each row begins and
    where the last ends (`offsets[0] == 0`, `offsets[-1] == len(ids)`, rows + 1 entries, no empty row).

    After `os.fork()` the child has none of an engine's threads: all calls but `info` raise InputError there, unless the
    engine is of one thread on the CPU. Load it in the child.
    """

    @staticmethod
    def load(
        model_dir: str | PathLike[str],
        *,
        device: str = "cpu",
        dtype: str = "auto",
        threads: int | None = None,
        cpu: str | None = None,
        communicator: TcpCommunicator | NcclCommunicator | None = None,
    ) -> Engine:
        """Load the model in a folder.

        Args:
            model_dir: holds config.json, safetensors, and sentence-transformers' files where there are any; or a GGUF
                file, or a folder that holds one and no config.json.
            device: "cpu"; "cuda", the first CUDA device that this process sees, or "cuda:1" and so on; "auto": "cuda"
                where build and machine have it, else "cpu".
            dtype: how weights are held: "float32" (which "auto" means), "bfloat16" or, on CUDA alone, "float16", both
                rounded to nearest and half the memory; weights stored in another format are converted. Arithmetic is
                float32; on CUDA, and for bfloat16 on CPUs with AMX, what is multiplied with halves is rounded to halves
                first, and sums are float32. On the CPU alone, "int8": each 64 numbers along a matrix' rows are mixed by
                a Walsh-Hadamard transform and held as signed bytes with one float32 scale, the rows that they meet are
                rounded alike, products within a block summed exactly and blocks in float32; embeddings are bfloat16
                (not those that are a head, too), everything else float32.
            threads: at most so many; never more than affinity and the CPU quota allow, which is the default.
            cpu: the instruction set, "scalar", "avx2", "avx512" or, for bfloat16 alone, "amx"; by default the best that
                the machine has. "amx-software" computes what the manual says of "amx", anywhere, slowly: for tests.
            communicator: this process's place among the ranks that the model is split over; each loads its own slices.
                All load the same files with the same options, which is checked, each with a communicator of its own.
                Then rank 0's engine is used as any other, and all others `follow`.

        Raises:
            ModelError: the folder does not hold a whole, supported model; all problems are told together.
            DeviceError: the device, dtype or instruction set is not there.
            InputError: an option that makes no sense ("amx" for float32 is one), or a model that cannot be split over
                so many ranks.
            CommunicatorError: another rank is gone, or could not load the model.
        """
    @property
    def info(self) -> dict[str, Any]:
        """What `inspect` tells of the whole model, `threads` and `cpu` (instruction set) in force, `rank`, `world`."""
    def hidden_states(self, ids: _UInt32s, offsets: _UInt32s, type_ids: _UInt32s | None = None) -> Array:
        """Compute the last hidden states, `(tokens, hidden_size)`; `bad_rows` are token rows.

        Raises:
            InputError: ids, offsets or type_ids that do not fit each other or the model.
        """
    def embed(
        self,
        ids: _UInt32s,
        offsets: _UInt32s,
        *,
        pooling: str = "auto",
        normalize: bool | Literal["auto"] = "auto",
        dimensions: int | None = None,
        type_ids: _UInt32s | None = None,
        skip_tokens: int = 0,
    ) -> Array:
        """Compute one embedding per row, `(rows, width)`: pool, Dense modules, cut to `dimensions`, normalise.

        Args:
            ids: token ids of all rows.
            offsets: where each row begins.
            pooling: "auto" (what the model's files say), "cls", "max", "mean", "mean_sqrt_len", "weighted_mean" or
                "last"; several joined by "+" give rows joined in that order.
            normalize: "auto" (what the model's files say), True or False.
            dimensions: keep the first so many numbers.
            type_ids: token type ids of all rows; zeros by default.
            skip_tokens: leave so many tokens at the start of each row out of the pooling (a prompt's, for a model whose
                files say `include_prompt: false`).

        Raises:
            InputError: arguments that do not fit each other or the model, or "auto" where its files do not say.
        """
    def classify(self, ids: _UInt32s, offsets: _UInt32s, type_ids: _UInt32s | None = None) -> Array:
        """Compute the logits of every row, `(rows, labels)`, before any softmax or sigmoid.

        Raises:
            InputError: arguments that do not fit the model, or a model without a classification head.
        """
    def logits(self, ids: _UInt32s, offsets: _UInt32s) -> Array:
        """Compute the logits of every token over the vocabulary, `(tokens, vocab_size)`; decoders with a head only.

        Raises:
            InputError: arguments that do not fit the model, or a model without a language model head.
        """
    def token_logprobs(self, ids: _UInt32s, offsets: _UInt32s) -> Array:
        """Compute the logarithm of every token's probability after those before it in its row, `(tokens, 1)`.

        The first token of a row, which nothing comes before, gets 0. Few tokens' logits are in memory at a time.

        Raises:
            InputError: as of `logits`.
        """
    def follow(self) -> None:
        """Compute this rank's part of all that rank 0's engine is asked for; return once that is closed or dropped.

        For ranks other than 0, which can be asked for nothing else. Waits for rank 0 as long as that lives, however
        long it has nothing to ask; an interrupt ends the group.

        Raises:
            CommunicatorError: the group was over before: a rank is gone, silent or out of step.
            InputError: there is no other rank to follow.
        """
    def close(self) -> None:
        """End the work of all ranks: `follow` returns on the others, and this engine can be asked for nothing more.

        Dropping the engine and its generators does the same. A whole model has nothing to close.

        Raises:
            CommunicatorError: another rank could not be told.
        """
    def generator(
        self,
        *,
        max_rows: int = 64,
        cache_bytes: int | None = None,
        step_tokens: int = 512,
        longest_tokens: int = 0,
        beams: int = 1,
    ) -> Generator:
        """Make a generator, with a cache of its own.

        Args:
            max_rows: sequences in the model at a time.
            cache_bytes: keys and values at most; by default 1 GiB, or what `max_rows` full rows need if that is less. A
                small cache makes requests wait, or begin again, but changes nothing of what they give.
            step_tokens: tokens of a step: one of every running row, then prompts. More is faster on long prompts, less
                keeps the steps of others short.
            longest_tokens: of the longest request that is to come, its new ones included: a cache that could not hold
                it is made as large as that. By default a request that does not fit is refused.
            beams: of that request.

        Raises:
            InputError: a model without a language model head, or a limit that makes no sense.
        """

class _Constraint(Protocol):
    def mask(self, new_ids: list[int], /) -> bytes | None: ...

@final
class Event:
    """News of one request."""

    @property
    def request_id(self) -> int:
        """The request."""
    @property
    def ids(self) -> list[int]:
        """Its tokens since its last event; never a stop token."""
    @property
    def logprobs(self) -> list[float]:
        """Their log-probabilities under the model's own distribution, before penalty, mask and temperature."""
    @property
    def finish(self) -> Literal["stop", "length", "stopped", "error"] | None:
        """Why the request ended, in its last event: a stop token or its constraint, its length, `stop`, an error."""
    @property
    def error(self) -> str | None:
        """What went wrong, where `finish` is "error"."""

@final
class Generator:
    """Generates tokens for many requests at a time; see `Engine.generator`. For one thread at a time.

    What a request gives depends on its prompt and options alone, not on the others or on the cache's size.
    """

    def add(
        self,
        request_id: int,
        ids: _UInt32s,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        seed: int = 0,
        stop_ids: Sequence[int] = (),
        beams: int = 1,
        length_penalty: float = 1.0,
        min_new_tokens: int = 0,
        constraint: _Constraint | None = None,
    ) -> None:
        """Take a request; it begins when there is room.

        Logits pass through repetition penalty, constraint, temperature, top-k, top-p and min-p in that order.

        Args:
            request_id: the caller's number, of no other request on its way.
            ids: the prompt, at least one token.
            max_new_tokens: at most so many new tokens; fewer where the model's positions end.
            temperature: divides the logits; 0 takes the most likely token, of equals the lowest id.
            top_k: only the so many most likely tokens.
            top_p: only the most likely tokens that reach this probability together.
            min_p: only tokens at least this likely, as a share of the most likely one's probability.
            repetition_penalty: makes tokens of prompt and output less likely when above 1.
            seed: the random numbers are a function of it and of the number of new tokens.
            stop_ids: tokens that end the output, without being part of it.
            beams: beams of a beam search, whose tokens come in one event at its end; needs temperature 0.
            length_penalty: a beam's log-probability is divided by its length to this power.
            min_new_tokens: no stop token is taken before so many, unless the constraint allows nothing else.
            constraint: its `mask(new_ids)` is called before every choice with the tokens since the last call, and
                returns a bit per token id, little-endian uint32 words with the least significant bit first, or None to
                end the output. An exception of it ends this request alone.

        Raises:
            InputError: a prompt or option that makes no sense or fits neither model nor cache.
        """
    def step(self) -> list[Event]:
        """Carry tokens of all requests that have room through the model, and tell what came of it.

        Prompts enter in pieces of `step_tokens`; a request that has its prompt behind it gets one token. Nothing
        happens where no request is pending.
        """
    def stop(self, request_id: int) -> None:
        """End a request: its room is free at once, its last event comes with the next step. Unknown ids are ignored."""
    @property
    def free_rows(self) -> int:
        """Rows that further requests could take at once; a beam search takes as many as it has beams."""
    @property
    def pending(self) -> int:
        """Requests whose last event has not been told."""
    @property
    def stats(self) -> dict[str, Any]:
        """What has been done and what the cache holds.

        Keys: steps, prefill_tokens (those of preempted requests again), decode_tokens, shared_tokens (of prompts, found
        in the cache), preemptions, model_s, mask_s and sampling_s (seconds), block_bytes (of 16 tokens), blocks,
        held_blocks, kept_blocks (of no request, kept for a later one that begins alike).
        """

@final
class TcpCommunicator:
    """A rank of a group of processes, connected to all others over TCP, which a model is split over.

    Every wait has a deadline: a rank that is gone or silent is an error on all others, after which the group is over.
    """

    def __new__(cls, rank: int, world: int, addresses: Sequence[str], token: str, timeout_s: float) -> TcpCommunicator:
        """Connect to the other ranks; return once all are there.

        Args:
            rank: the place of this process, below `world`.
            world: how many processes there are.
            addresses: "host:port" of rank 0 alone, where the others meet, or of every rank.
            token: a secret of the group, the same for all ranks; whoever does not know it is refused. It is sent as it
                is: use loopback or a network that you trust.
            timeout_s: how long to wait for the others here, and for any one of them in every operation afterwards.

        Raises:
            InputError: arguments that name no group.
            CommunicatorError: a rank did not come in time, or is of another group.
        """
    @property
    def rank(self) -> int:
        """The place of this process."""
    @property
    def world(self) -> int:
        """How many processes there are."""
    def abort(self, reason: str) -> None:
        """End the group, from any thread: whatever a rank waits for fails with `reason`."""

@final
class NcclCommunicator:
    """A rank of a group of processes over NCCL, one CUDA device each.

    Numbers go over NCCL; orders, barriers and signs of life go over a group over TCP that the ranks have made before. A
    rank that is silent past that one's deadline, or closes its connection to it, is an error on all others.
    """

    def __new__(cls, control: TcpCommunicator, *, device: int = 0, unique_id: bytes | None = None) -> NcclCommunicator:
        """Join the ranks of `control`, all of which call it; return once all are there.

        Args:
            control: the group, which nothing else may use from then on. Its deadline is this one's, too.
            device: this rank's CUDA device among those that this process sees; it has nothing to do with the rank, and
                is 0 where every process sees one device alone.
            unique_id: rank 0's, from `nccl_unique_id`; without one it makes one. The others hear it from rank 0.

        Raises:
            DeviceError: a build without NCCL; or NCCL, the driver or the device is not there, here or on another rank.
            CommunicatorError: the ranks did not come together.
            InputError: an argument that makes no sense, or a group that is in use.
        """
    @property
    def rank(self) -> int:
        """The place of this process."""
    @property
    def world(self) -> int:
        """How many processes there are."""
    def abort(self, reason: str) -> None:
        """End the group, from any thread: whatever a rank waits for fails with `reason`."""

def inspect(model_dir: str | PathLike[str], *, pooling: str = "auto") -> dict[str, Any]:
    """Tell a model's facts from its JSON files and the headers of its weights, checked as `Engine.load` checks them.

    Keys: architecture, model_type, kind ("encoder" or "decoder"), hidden_size, layers, heads, kv_heads, head_dim, tied
    (whether the token table gives the logits; None for a model that gives none), vocab_size, max_positions (the most
    tokens of a row), type_vocab_size, labels and num_labels and problem_type (None where there is no classifier),
    dtype, device, pooling (list of modes, or None where the files do not say), normalize, include_prompt, embedding_dim
    (under that pooling, or None), transformer_path (relative to model_dir), weight_bytes, parameters.

    Args:
        model_dir: as of `Engine.load`.
        pooling: "auto", or the pooling that `embed` will be asked for: `pooling` and `embedding_dim` are then its own.

    Raises:
        ModelError: as of `Engine.load`.
        InputError: a pooling that is not known or that does not fit the model's Dense modules.
    """

def inspect_rank(
    model_dir: str | PathLike[str], rank: int, world: int
) -> dict[str, tuple[int | None, int, int, int] | None]:
    """Tell which part of every tensor a rank of a split model loads, from the headers of its weights.

    Values: axis, start, stop (exclusive), and the number of equal blocks along the axis of each of which these places
    are meant (1 but for layers that stand one below the other in one tensor); axis None for a whole tensor; None for
    nothing of it.

    Raises:
        ModelError: as of `Engine.load`.
        InputError: a model that cannot be split over so many ranks; the hint names the numbers that work.
    """

def capabilities() -> dict[str, Any]:
    """Tell what this build and this machine can do.

    Keys: version, candle_version, cpu_features (name to bool), cpu, cpu_bfloat16 and cpu_int8 (the instruction sets
    that models in float32, bfloat16 and int8 run on here; the last is "avx512-vnni", "avx-vnni", "avx2" or "scalar"),
    cuda, nccl, threads_default.
    """

def convert_pickle(source: str | PathLike[str], target_dir: str | PathLike[str]) -> dict[str, Any]:
    """Convert `pytorch_model.bin`, or a `pytorch_model.bin.index.json` and its shards, to safetensors in `target_dir`.

    The pickle is taken apart as data; nothing that it says is run. Keys of the result: files, tensors, size_bytes.

    Raises:
        ModelError: a file that is damaged or holds anything but tensors.
        InputError: the target holds weights already.
    """

def gguf_metadata(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a GGUF file's metadata: plain numbers, truth values, strings, and lists of one of these.

    Strings whose bytes are no UTF-8 come with replacement characters. No tensor is looked at.

    Raises:
        ModelError: a file that is missing, damaged, or of another format or version.
    """

def nccl_unique_id() -> bytes:
    """Make an id for a group over NCCL, 128 bytes. Needs NCCL, but no device.

    Raises:
        DeviceError: a build without NCCL, or NCCL is not there.
    """
