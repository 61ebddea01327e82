"""The pooling of a checkpoint as plain frozen data: which states, which layers behind them, what scores mean."""

from __future__ import annotations

import enum

import msgspec

from tokenmill.core.pooling import PoolingTask, PoolMode


class Activation(enum.Enum):
    """A function between layers, or of scores."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"
    TANH = "tanh"
    GELU = "gelu"
    RELU = "relu"
    SILU = "silu"


class DenseSpec(msgspec.Struct, frozen=True):
    """A layer behind the pooled states: activation(x W^T + b), perhaps added to x.

    Attributes:
        folder: below the checkpoint's, where its weights lie in a file of their own; "": among the model's.
        name: of its weights, without `.weight` and `.bias`.
        has_bias: None: if the file has one.
        sizes: (in, out), as its config says; None: it says none.
    """

    folder: str
    name: str
    activation: Activation
    has_bias: bool | None = None
    has_residual: bool = False
    sizes: tuple[int, int] | None = None


class LayerNormSpec(msgspec.Struct, frozen=True):
    """A layer norm behind the pooled states, with a weight and a bias. `folder`, `name`: as of `DenseSpec`."""

    folder: str
    name: str
    eps: float = 1e-5
    has_bias: bool | None = None


class TokenScoreSpec(msgspec.Struct, frozen=True):
    """A score that is the logit of one token of the output head less that of another: one row of weights.

    Attributes:
        true_token, false_token: ids, or spellings in the vocabulary; "": there is no such token.
    """

    true_token: int | str
    false_token: int | str = ""


class RowScoreSpec(msgspec.Struct, frozen=True):
    """A score that is the logit of one row of a matrix less that of another: the probability of one of two labels."""

    name: str
    true_row: int
    false_row: int


Step = DenseSpec | LayerNormSpec | TokenScoreSpec | RowScoreSpec


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The way from the states of a prompt to its vector or scores.

    Attributes:
        modes: in the order of `PoolMode`.
        includes_prompt: the tokens of a prompt are pooled, too.
        steps: layers behind the pooled states, in order. The last of a classifier makes its scores.
        activation: of scores.
        labels: names, in the order of scores.
        prompts, default_prompt: see `PoolingInfo`.
        takes_dimensions, dimensions: see `PoolingInfo`.
        max_length: most tokens of a text; None: as many as the model takes.
        lowers_case: texts are put in lower case.
        assumed: sentences about what the files do not say.
    """

    task: PoolingTask
    modes: tuple[PoolMode, ...]
    includes_prompt: bool = True
    steps: tuple[Step, ...] = ()
    activation: Activation = Activation.IDENTITY
    labels: tuple[str, ...] = ()
    prompts: tuple[tuple[str, str], ...] = ()
    default_prompt: str = ""
    takes_dimensions: bool = False
    dimensions: tuple[int, ...] = ()
    max_length: int | None = None
    lowers_case: bool = False
    assumed: tuple[str, ...] = ()
