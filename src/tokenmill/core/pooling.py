"""Pooling as requests ask for it and as engines tell of it: one vector, or scores, in the place of a continuation."""

from __future__ import annotations

import enum

import msgspec


class PoolingTask(enum.Enum):
    """The answer of a model that does not generate: a vector for each text, or a score for each of its labels."""

    EMBED = "embed"
    CLASSIFY = "classify"


class PoolMode(enum.Enum):
    """A way to make one vector of the last layer's states, by the name that sentence-transformers has for it.

    Several are concatenated in this order. `WEIGHTED`: token k weighs k, counted from 1; `SQRT`: the sum over the root
    of the number of tokens.
    """

    CLS = "cls"
    MAX = "max"
    MEAN = "mean"
    SQRT = "mean_sqrt_len_tokens"
    WEIGHTED = "weightedmean"
    LAST = "last"


MEAN_ONLY = (PoolMode.MEAN,)
EMBEDS_ONLY = "this model embeds texts: use /v1/embeddings"
"""The answer to requests for text of a model that has no output head."""


class PoolingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The vector or scores that a request asks for.

    Attributes:
        modes: in the order of `PoolMode`.
        first: tokens before this one are not pooled: those of a prompt that only steers.
        second: the token that the second text of a pair begins with, where models tell texts by types of tokens; 0:
            all tokens are of the first type.
        dimensions: of the vector, which is cut before it is normalized; 0: all.
        normalizes: the vector gets length 1.
        activates: scores go through the model's activation; else they are logits.
    """

    modes: tuple[PoolMode, ...] = MEAN_ONLY
    first: int = 0
    second: int = 0
    dimensions: int = 0
    normalizes: bool = True
    activates: bool = True

    @property
    def needs_whole_prompt(self) -> bool:
        """True if every token of the prompt must be run, whatever the prefix cache has."""
        return self.modes != (PoolMode.LAST,)


class PoolingInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The pooling of a served model, for the other processes.

    Attributes:
        size: numbers of a vector; of a classifier, its labels.
        modes: in the order of `PoolMode`.
        includes_prompt: the tokens of a prompt of `prompts` are pooled, too.
        takes_dimensions: vectors may be cut (Matryoshka). dimensions: to these sizes; empty: to any.
        prompts: texts to put before an input, by name. default_prompt: the name of the one that always is; "": none.
        template: the text of a pair, with {query}, {document} and {instruction}; "": the tokenizer joins the two.
        instruction: where a request gives none.
        labels: names, in the order of scores.
        activation: of scores: sigmoid, softmax or identity.
        lowers_case: texts are put in lower case.
        tells_by_type: the model tells the texts of a pair apart by types of tokens (BERT).
    """

    task: PoolingTask
    size: int
    modes: tuple[PoolMode, ...] = MEAN_ONLY
    includes_prompt: bool = True
    takes_dimensions: bool = False
    dimensions: tuple[int, ...] = ()
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    template: str = ""
    instruction: str = ""
    labels: tuple[str, ...] = ()
    activation: str = ""
    lowers_case: bool = False
    tells_by_type: bool = False

    @property
    def is_reranker(self) -> bool:
        """True for a classifier of one label: the score says how well a document answers a query."""
        return self.task is PoolingTask.CLASSIFY and self.size == 1

    @property
    def purpose(self) -> str:
        """The sentence that a request of another kind gets."""
        if self.task is PoolingTask.EMBED:
            return f"{EMBEDS_ONLY}, /rerank or /score"
        if self.is_reranker:
            return "this model scores pairs of texts: use /rerank or /score"
        return "this model classifies texts: use /classify"


class PoolInput(msgspec.Struct, array_like=True, omit_defaults=True):
    """A text, or its token ids; `second`: the text that it is compared with, None: there is one text."""

    text: str = ""
    token_ids: list[int] | None = None
    second: str | None = None


class Cut(enum.Enum):
    """The side on which a text loses what is too long; `OFF`: it is refused."""

    OFF = "off"
    RIGHT = "right"
    LEFT = "left"


class PooledTexts(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The texts of one call, each of which becomes a request.

    Attributes:
        prefix: a text before each of them. includes_prefix: its tokens are pooled, too.
        template: see `PoolingInfo`; "": the tokenizer joins the texts of a pair.
        cut: None: as the server cuts.
        limit: most tokens of each; None: as many as the model takes.
        param: the client's name for them, in errors.
    """

    inputs: list[PoolInput]
    prefix: str = ""
    includes_prefix: bool = True
    template: str = ""
    instruction: str = ""
    cut: Cut | None = None
    limit: int | None = None
    lowers_case: bool = False
    adds_special_tokens: bool = True
    param: str = "input"
