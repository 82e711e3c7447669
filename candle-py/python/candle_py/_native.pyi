"""The native half of `candle_py`: what the compiled module offers, as types."""

from os import PathLike
from typing import Any, Literal, Protocol, TypeAlias, final

from typing_extensions import Buffer

__all__ = ["Array", "Engine", "capabilities", "convert_pickle", "gguf_metadata", "inspect"]

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
    """

    @staticmethod
    def load(
        model_dir: str | PathLike[str],
        *,
        device: str = "cpu",
        dtype: str = "auto",
        threads: int | None = None,
        cpu: str | None = None,
        communicator: object | None = None,
    ) -> Engine:
        """Load the model in a folder.

        Args:
            model_dir: holds config.json, safetensors, and sentence-transformers' files where there are any; or a GGUF
                file, or a folder that holds one and no config.json.
            device: "cpu" or "auto".
            dtype: what to compute with: "auto" or "float32"; weights stored in float16 or bfloat16 are converted.
            threads: at most so many; never more than affinity and the CPU quota allow, which is the default.
            cpu: the instruction set, "scalar", "avx2" or "avx512"; by default the best that the machine has.
            communicator: must be None.

        Raises:
            ModelError: the folder does not hold a whole, supported model; all problems are told together.
            DeviceError: the device, dtype or instruction set is not there.
            InputError: an option that makes no sense.
        """
    @property
    def info(self) -> dict[str, Any]:
        """What `inspect` tells, and `threads` and `cpu` (the instruction set) in force."""
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

        The first token of a row, which nothing comes before, gets 0. The logits of a few tokens are in memory at a time.

        Raises:
            InputError: as of `logits`.
        """

def inspect(model_dir: str | PathLike[str], *, pooling: str = "auto") -> dict[str, Any]:
    """Tell a model's facts from its JSON files and the headers of its weights, checked as `Engine.load` checks them.

    Keys: architecture, model_type, kind ("encoder" or "decoder"), hidden_size, layers, heads, kv_heads, head_dim, tied
    (whether the token table gives the logits; None for a model that gives none), vocab_size, max_positions (the most
    tokens of a row), type_vocab_size, labels and num_labels and problem_type (None where there is no classifier), dtype, device, pooling
    (list of modes, or None where the files do not say), normalize, include_prompt, embedding_dim (under that pooling,
    or None), transformer_path (relative to model_dir), weight_bytes, parameters.

    Args:
        model_dir: as of `Engine.load`.
        pooling: "auto", or the pooling that `embed` will be asked for: `pooling` and `embedding_dim` are then its own.

    Raises:
        ModelError: as of `Engine.load`.
        InputError: a pooling that is not known or that does not fit the model's Dense modules.
    """

def capabilities() -> dict[str, Any]:
    """Tell what this build and this machine can do.

    Keys: version, candle_version, cpu_features (name to bool), cpu (the best instruction set here), cuda, nccl,
    threads_default.
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
