"""The `task` section of a spec: what is computed from each row, and which settings belong to which kind of task.

Looks at no data and no model: what only they can tell is decided by `jobs.prepare` and `jobs.prepare_decoder`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from sharding.errors import InputError


def as_tuple(value: object) -> object:
    """A single string where a list of them is meant."""
    return (value,) if isinstance(value, str) else value


def _as_auto(value: object) -> object:
    return "auto" if value is None else value


MOST = 1 << 60
"""The greatest number of anything, so that sums of them fit in 64 bits."""
Count = Annotated[int, Field(ge=1, le=MOST)]
CountFromZero = Annotated[int, Field(ge=0, le=MOST)]
AutoCount = Count | Literal["auto"]
Auto = Literal["auto"]
_NullIsAuto = BeforeValidator(_as_auto)
_PROMPTED = ("generate", "score")


class Section(BaseModel):
    """What every section of a spec is: frozen, strict about types, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=False)


class MessageSpec(Section):
    """One message of a chat prompt."""

    role: Literal["system", "user", "assistant"] = Field(description="Who says it.")
    content: str = Field(
        description="A template over columns: `{title}` is a column, `{{` and `}}` are braces, the rest is literal."
    )

    @field_validator("content")
    @classmethod
    def _template_is_whole(cls, text: str) -> str:
        return _checked_template(text, bare_column=False)


class GenerationSpec(Section):
    """How tokens are chosen. `auto`: what the model's generation_config.json says, else greedy and off."""

    defaults: Literal["model", "none"] = Field(
        "model", description="model: `auto` obeys the model's generation_config.json; none: it gives end tokens only."
    )
    max_new_tokens: Annotated[AutoCount, _NullIsAuto] = Field(
        "auto", description="Most new tokens of a completion; auto: what the model's file says, else 256."
    )
    min_new_tokens: Annotated[CountFromZero | Auto, _NullIsAuto] = Field(
        "auto", description="No end token before so many new tokens. Stop strings end a text all the same."
    )
    temperature: Annotated[Annotated[float, Field(ge=0, le=1e6)] | Auto, _NullIsAuto] = Field(
        "auto", description="0: greedy, the likeliest token each time. Higher: more variety, more nonsense."
    )
    top_k: Annotated[CountFromZero | Auto, _NullIsAuto] = Field(
        "auto", description="Sample among this many likeliest tokens; 0: all."
    )
    top_p: Annotated[Annotated[float, Field(ge=1e-6, le=1)] | Auto, _NullIsAuto] = Field(
        "auto", description="Sample among the likeliest tokens that together have this probability; 1: all."
    )
    min_p: Annotated[Annotated[float, Field(ge=0, le=1)] | Auto, _NullIsAuto] = Field(
        "auto", description="Sample among tokens with this share of the likeliest one's probability; 0: all."
    )
    repetition_penalty: Annotated[Annotated[float, Field(ge=1e-6, le=1e6)] | Auto, _NullIsAuto] = Field(
        "auto", description="Above 1 makes tokens that were there before less likely; 1: off."
    )
    beams: Annotated[AutoCount, _NullIsAuto] = Field(
        "auto", description="Beam search over this many; 1: off. Costs as many times the work; never samples."
    )
    length_penalty: Annotated[Annotated[float, Field(ge=-1e6, le=1e6)] | Auto, _NullIsAuto] = Field(
        "auto", description="Beam search: above 0 favours longer texts, below 0 shorter ones."
    )
    n: Annotated[int, Field(ge=1, le=256)] = Field(
        1, description="Completions of each row; above 1 the result columns are lists. Needs a temperature above 0."
    )
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = Field(
        0, description="A row's random numbers come from this, its place in the input and the token's place alone."
    )
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(as_tuple)] = Field(
        (), description="Strings that end a text, wherever tokens are cut; the text ends before them."
    )
    stop_tokens: tuple[Annotated[str, Field(min_length=1)] | CountFromZero, ...] = Field(
        (),
        description="Further tokens that end a text, as id or as the vocabulary writes them (`<|im_end|>`); any other "
        "text goes into `stop`.",
    )

    @model_validator(mode="after")
    def _bounds_agree(self) -> GenerationSpec:
        least, most = self.min_new_tokens, self.max_new_tokens
        if least != "auto" and most != "auto" and least > most:
            raise ValueError("`min_new_tokens` is more than `max_new_tokens`")
        searches = self.beams != "auto" and self.beams > 1
        if searches and self.temperature != "auto" and self.temperature > 0:
            raise ValueError(
                "beam search does not sample: `beams` above 1 and a `temperature` above 0 exclude each other"
            )
        if self.n > 1 and (searches or self.temperature == 0):
            raise ValueError("greedy texts of one prompt are all equal: `n` above 1 needs a `temperature` above 0")
        return self


class TaskSpec(Section):
    """What is computed from each row."""

    kind: Literal["embed", "classify", "rerank", "generate", "score"] = Field(description="What to compute.")
    text: str | None = Field(
        None,
        description="A column, or a template over columns: `{title}\\n\\n{body}`. generate, score, classify with "
        "labels: the prompt (score: may be left out).",
    )
    query: str | None = Field(None, min_length=1, description="rerank: the first text of the pair, likewise.")
    messages: tuple[MessageSpec, ...] | None = Field(
        None,
        description="generate, score, classify with labels: instead of `text`, a chat, rendered by the model's own "
        "chat template.",
    )
    chat: bool | Auto = Field(
        "auto",
        description="Whether a prompt given as `text` is the user's message of a chat. auto: for generate, if the "
        "model has a chat template; else no.",
    )
    chat_template_args: dict[str, Any] = Field(
        {}, description="Passed to the model's chat template, such as `enable_thinking: false`."
    )
    answer: str | None = Field(
        None, min_length=1, description="score: the text whose likelihood is computed, a column or a template."
    )
    labels: tuple[Annotated[str, Field(min_length=1)], ...] | None = Field(
        None,
        description="classify by a decoder without a classification head: compare how likely each of these texts "
        "is as the answer to the prompt. Costs the prompt once per label.",
    )
    generation: GenerationSpec = Field(
        GenerationSpec(), description="generate: how tokens are chosen, and when to end."
    )
    json_schema: dict[str, Any] | str | None = Field(
        None, description="generate: only JSON that fits this schema, given here or as the path of a file."
    )
    activation: Literal["auto", "none"] = Field(
        "auto", description="classify, rerank: auto (one logit: sigmoid; several: softmax) or none (raw logits)."
    )
    prompt: str = Field(
        "auto",
        description="auto (the model's default_prompt_name, if it names one), none, a prompt's name in the model's "
        "files, or literal text put before every text. Costs its tokens in every row.",
    )
    pooling: str = Field(
        "auto",
        description="auto (what the model's files say), cls, mean, max, last, weighted_mean, mean_sqrt_len, or several "
        "joined by +. A mode the model was not trained with gives worse vectors.",
    )
    normalize: bool | Literal["auto"] = Field("auto", description="L2-normalise; auto: what the model's files say.")
    dimensions: Count | None = Field(
        None,
        description="Cut vectors to this many values before normalising: smaller files, and worse vectors unless "
        "the model was trained for it (Matryoshka).",
    )
    max_tokens: AutoCount = Field(
        "auto",
        description="Most tokens of one row (generate: of its prompt). Fewer is faster and loses the ends of long "
        "texts; never above what model and tokenizer allow.",
    )
    truncate: Literal["end", "error"] = Field("end", description="Cut longer texts, or make them row errors.")

    @property
    def by_likelihood(self) -> bool:
        """Whether the task runs a decoder's head over tokens: generate, score, or classify with labels."""
        return self.kind in _PROMPTED or self.labels is not None

    @field_validator("text", "query", "answer")
    @classmethod
    def _template_is_whole(cls, text: str | None) -> str | None:
        return text if not text else _checked_template(text, bare_column=True)

    @model_validator(mode="after")
    def _keys_belong_to_the_kind(self) -> TaskSpec:
        for key, kinds in _KINDS.items():
            if self._is_given(key) and self.kind not in kinds:
                raise ValueError(f"`{key}` belongs to `kind: {' or '.join(kinds)}` only")
        for key, kind in (("query", "rerank"), ("answer", "score")):
            if self.kind == kind and getattr(self, key) is None:
                raise ValueError(f"`{key}` is needed by `kind: {kind}`")
        self._check_labels()
        self._check_prompt()
        if self.json_schema is not None and self.generation.beams != "auto" and self.generation.beams > 1:
            raise ValueError("beam search cannot follow a JSON schema: `json_schema` and `beams` exclude each other")
        return self

    def _is_given(self, key: str) -> bool:
        """Whether a key says anything: a default written out does not."""
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    def _check_labels(self) -> None:
        if self.labels is None:
            return
        if len({label.strip() for label in self.labels} - {""}) < max(2, len(self.labels)):
            raise ValueError("`labels` are at least two, each once and not blank (white space around them aside)")

    def _check_prompt(self) -> None:
        if self.messages is None:
            if not self.text and self.kind != "score":
                raise ValueError(f"`text` is needed by `kind: {self.kind}`")
            if not self.text and self.chat is True:
                raise ValueError("`chat: true` needs `text` or `messages`")
        else:
            if not self.messages:
                raise ValueError("`messages` holds no message")
            if self.text is not None:
                raise ValueError("`text` and `messages` exclude each other")
            if self.chat is False:
                raise ValueError("`messages` are a chat: `chat: false` excludes them")
        if not self.by_likelihood:
            for key in ("messages", "chat", "chat_template_args"):
                if self._is_given(key):
                    raise ValueError(f"`{key}` belongs to `kind: generate or score`, or classify with `labels`")
        elif self.prompt != "auto":
            raise ValueError("`prompt` belongs to encoders: write the prompt into `text` or `messages`")


_KINDS: dict[str, tuple[str, ...]] = {
    "query": ("rerank",),
    "messages": ("generate", "score", "classify"),
    "chat": ("generate", "score", "classify"),
    "chat_template_args": ("generate", "score", "classify"),
    "answer": ("score",),
    "labels": ("classify",),
    "generation": ("generate",),
    "json_schema": ("generate",),
    "activation": ("classify", "rerank"),
    "pooling": ("embed",),
    "normalize": ("embed",),
    "dimensions": ("embed",),
}
"""Keys that only some kinds know."""


def _checked_template(text: str, *, bare_column: bool) -> str:
    from workers.prompt.template import parse_template

    try:
        parse_template(text, bare_column=bare_column)
    except InputError as error:
        raise ValueError(error.message.partition(": `")[0]) from None
    return text
