"""Sampling and endings in force: the spec's settings, then generation_config.json's, then greedy and off.

Decides before a job starts, once; knows no rows. Each decision comes with a note that says where it is from.

generation_config.json is read as transformers does: its temperature, top_k, top_p and min_p count only with
`do_sample: true`; `repetition_penalty` and `num_beams` count always. Keys that would change the result and are not
supported are an error that names them, unless the spec says `generation.defaults: none`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharding.errors import InputError
from workers.config import Sampling
from workers.errors import ModelError
from workers.model.decoder import GENERATION_CONFIG, DecoderFiles

DEFAULT_MAX_NEW_TOKENS = 256
_LEAST, _MOST = 1e-6, 1e6
"""Bounds of numbers that are not 0: beyond them float32 arithmetic means nothing."""
_LEAVE_OUT = "set task.generation.defaults: none to leave the file's defaults out, and the values you want"
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "top_h": (None,),
    "penalty_alpha": (None, 0, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1, 1.0),
    "bad_words_ids": (None, []),
    "force_words_ids": (None, []),
    "constraints": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "sequence_bias": (None, {}),
    "guidance_scale": (None, 1, 1.0),
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0, 0.0),
    "exponential_decay_length_penalty": (None,),
    "stop_strings": (None, []),
    "watermarking_config": (None,),
    "remove_invalid_values": (None, False),
    "renormalize_logits": (None, False),
}
"""Keys that change what is generated and are not supported, with the values that mean off."""
_ONLY_SAMPLING = frozenset({"typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"})


@dataclass(frozen=True, slots=True)
class EndTokens:
    """Ids that end a text, and where each comes from, in words."""

    ids: tuple[int, ...]
    note: str


class _Values:
    """Looks values up in order and remembers the origin of each."""

    def __init__(self, asked: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        self._asked = asked
        self._config = config
        self.notes: list[str] = []

    def take(
        self,
        name: str,
        default: float,
        *,
        key: str = "",
        use_file: bool = True,
        least: float = 0.0,
        most: float = _MOST,
        whole: bool = False,
    ) -> float:
        """A number by the spec's name; `key` is the file's, where it differs."""
        key = key or name
        value, origin = self._asked[name], "spec"
        if value == "auto":
            value, origin = (self._config.get(key) if use_file else None), GENERATION_CONFIG
        if value is None:
            value, origin = default, "default"
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value <= most or (whole and value != int(value)):
            if origin == "spec":
                raise InputError(f"task.generation.{name} cannot be used: `{value!r}`", hint=f"at most {most:g}")
            raise ModelError(f"{GENERATION_CONFIG} gives a {key} that cannot be used: `{value!r}`", hint=_LEAVE_OUT)
        if origin != "default" or value != default or name in ("temperature", "max_new_tokens"):
            self.notes.append(f"{name} {value:g} ({origin})")
        return float(value)

    def count(self, name: str, default: int, *, key: str = "", use_file: bool = True, least: int = 0) -> int:
        """The same of a whole number."""
        return int(self.take(name, default, key=key, use_file=use_file, least=least, whole=True))


def decide_sampling(
    asked: Mapping[str, Any], files: DecoderFiles | None, end_tokens: EndTokens
) -> tuple[Sampling, list[str]]:
    """Decide every value.

    Args:
        asked: The spec's section as plain data; `auto` leaves a value to the model's file.
        files: The model's files; None has none.
        end_tokens: As `find_end_tokens` gives them.

    Returns:
        The values, and notes for the plan.

    Raises:
        InputError: Values of the spec that exclude each other.
        ModelError: generation_config.json asks for what is not supported, or holds nonsense.
    """
    config = {} if files is None or asked["defaults"] == "none" else files.generation_config
    sampled = config.get("do_sample") is True
    _refuse_unsupported(config, sampled or _given(asked["temperature"]))
    values = _Values(asked, config)
    beams = values.count("beams", 1, key="num_beams", least=1)
    if beams > 1:
        _refuse(config, {"early_stopping": (None, False)})
    if asked["temperature"] == "auto" and (not sampled or beams > 1):
        temperature = 0.0
        reason = "beam search" if beams > 1 else f"{GENERATION_CONFIG} does not sample" if config else "default"
        values.notes.append(f"temperature 0, greedy ({reason})")
    else:
        temperature = values.take("temperature", 1.0)
    sampling = Sampling(
        max_new_tokens=values.count("max_new_tokens", DEFAULT_MAX_NEW_TOKENS, least=1),
        min_new_tokens=values.count("min_new_tokens", 0),
        temperature=temperature,
        top_k=values.count("top_k", 0, use_file=temperature > 0) or None,
        top_p=values.take("top_p", 1.0, use_file=temperature > 0, least=_LEAST, most=1.0),
        min_p=values.take("min_p", 0.0, use_file=temperature > 0, most=1.0),
        repetition_penalty=values.take("repetition_penalty", 1.0, least=_LEAST),
        beams=beams,
        length_penalty=values.take("length_penalty", 1.0, least=-_MOST),
        n=asked["n"],
        seed=asked["seed"],
        stop=asked["stop"],
        stop_ids=end_tokens.ids,
    )
    _check(sampling)
    notes = [f"generation: {', '.join(values.notes)}", end_tokens.note]
    return sampling, notes


def _given(value: Any) -> bool:
    return value != "auto" and bool(value)


def _refuse_unsupported(config: Mapping[str, Any], sampled: bool) -> None:
    _refuse(config, {key: off for key, off in _NEUTRAL.items() if sampled or key not in _ONLY_SAMPLING})


def _refuse(config: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    found = [f"{key} {config[key]!r}" for key, off in neutral.items() if key in config and config[key] not in off]
    if found:
        raise ModelError(f"{GENERATION_CONFIG} asks for what is not supported: `{', '.join(found)}`", hint=_LEAVE_OUT)


def _check(sampling: Sampling) -> None:
    if sampling.beams > 1 and sampling.temperature > 0:
        raise InputError(
            f"beam search does not sample: `beams {sampling.beams}, temperature {sampling.temperature:g}`",
            hint="set task.generation.temperature: 0, or beams: 1",
        )
    if 0 < sampling.temperature < _LEAST:
        raise InputError(f"task.generation.temperature is 0 or from {_LEAST:f} on: `{sampling.temperature:g}`")
    if sampling.n > 1 and sampling.greedy:
        raise InputError(
            f"greedy completions of one prompt are all equal: `task.generation.n: {sampling.n}`",
            hint="set task.generation.temperature above 0",
        )
    if sampling.min_new_tokens > sampling.max_new_tokens:
        raise InputError(f"min_new_tokens is more than max_new_tokens: `{sampling.max_new_tokens}`")


def find_end_tokens(
    files: DecoderFiles,
    vocab_size: int,
    *,
    turn_end: str | None = None,
    stop_tokens: Sequence[str | int] = (),
) -> EndTokens:
    """Tokens that end a text.

    Args:
        files: The model's.
        vocab_size: Rows of the model's embedding.
        turn_end: Text of the token by which the chat template ends an assistant's turn, or None.
        stop_tokens: Further ones, as text or id.

    Raises:
        InputError: One of `stop_tokens` is no token.
        ModelError: An id of the files is outside the vocabulary.
    """
    origins: dict[int, str] = {}
    for origin, ids in (
        (GENERATION_CONFIG, _ids(files.generation_config.get("eos_token_id"), GENERATION_CONFIG)),
        (files.config_place, _ids(files.config.get("eos_token_id"), files.config_place)),
        ("tokenizer", _ids(_id_of(files, files.special_tokens.get("eos_token")), "tokenizer")),
    ):
        if ids and not origins:
            origins = dict.fromkeys(ids, origin)
    beyond = [token for token in origins if not 0 <= token < vocab_size]
    if beyond:
        raise ModelError(f"an end token is outside the model's vocabulary of {vocab_size}: `{beyond[0]}`")
    turn_id = _id_of(files, turn_end)
    if turn_id is not None:
        origins.setdefault(turn_id, "end of turn in the chat template")
    for token in stop_tokens:
        found = token if isinstance(token, int) else _id_of(files, token)
        if found is None or found >= vocab_size:
            raise InputError(
                f"task.generation.stop_tokens names what is no token of the model: `{token}`",
                hint=_stop_token_hint(files, token),
            )
        origins.setdefault(found, "spec")
    shown = ", ".join(f"{files.tokenizer.id_to_token(token)} ({origin})" for token, origin in origins.items())
    note = f"end tokens: {shown}" if origins else "end tokens: none; every text runs to max_new_tokens or a stop string"
    return EndTokens(tuple(origins), note)


def _stop_token_hint(files: DecoderFiles, token: str | int) -> str:
    pieces = files.tokenizer.encode(token, add_special_tokens=False).tokens if isinstance(token, str) else []
    spelt = f"the vocabulary spells this one `{pieces[0]}`; " if len(pieces) == 1 else ""
    return (
        f"{spelt}a stop token is an id of the vocabulary, or one token as the vocabulary spells it, such as "
        "`<|im_end|>`; text that ends an answer wherever it comes goes into task.generation.stop"
    )


def _id_of(files: DecoderFiles, token: str | None) -> int | None:
    found: int | None = None if token is None else files.tokenizer.token_to_id(token)
    return found


def _ids(value: Any, place: str) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in values):
        raise ModelError(f"{place} gives an eos_token_id that is no id: `{value!r}`")
    return values
