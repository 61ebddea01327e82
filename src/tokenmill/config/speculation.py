"""Read `--speculative-config`, with vLLM's names, and keep all settings that a scheduler needs to speculate."""

from __future__ import annotations

from typing import Literal

import msgspec

from tokenmill.core.errors import InvalidConfig

Method = Literal["auto", "ngram", "suffix", "draft_model", "eagle3", "mtp"]
WITH_MODEL = ("draft_model", "eagle3")
# Other heads that run behind the model with its hidden states.
OTHER_HEADS = ("eagle", "medusa", "mlp_speculator", "dflash")
# What vLLM calls the same.
_METHOD_NAMES = {
    "[ngram]": "ngram",
    "prompt_lookup": "ngram",
    "qwen3_next_mtp": "mtp",
    "qwen3_5_mtp": "mtp",
}
MOST_TOKENS = 32
# Draft tokens at a time by default.
_DEFAULT_TOKENS = {"ngram": 16, "suffix": 24, "draft_model": 4, "eagle3": 4, "mtp": 3}


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of speculation: the value of `--speculative-config`.

    Attributes:
        method: auto is suffix on a CPU and no speculation elsewhere; mtp drafts with a layer of the model's checkpoint.
        num_speculative_tokens: draft tokens of a request and step at most; 0: as many as suit the method.
        model: the folder or hub id of a draft model or an EAGLE-3 head. quantization: of its weights, as
            `--quantization` names it; None: as the model's.
        draft_tensor_parallel_size: ranks that share a draft model; it is rank 0's alone.
        eagle_aux_hidden_state_layer_ids: for eagle3: behind how many layers the model is tapped; empty: as the head's
            config says.
        prompt_lookup_min, prompt_lookup_max: for ngram: how many tokens must have occurred before.
        suffix_decoding_max_tree_depth: for suffix: the most tokens of context and draft that are told apart.
        suffix_decoding_max_cached_requests: finished outputs that are remembered.
        suffix_decoding_max_spec_factor: draft tokens for each token of context that was found.
        suffix_decoding_min_token_prob: for suffix: the least probability of a draft.
    """

    method: Method = "auto"
    num_speculative_tokens: int = 0
    model: str | None = None
    quantization: Literal["none", "int8", "int4"] | None = None
    draft_tensor_parallel_size: int = 1
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] = ()

    @property
    def loads_weights(self) -> bool:
        """True if drafts come from weights besides the model's own."""
        return self.method == "mtp" or self.model is not None

    @property
    def most_tokens(self) -> int:
        """`num_speculative_tokens`, or the number that suits the method."""
        return self.num_speculative_tokens or _DEFAULT_TOKENS.get(self.method, 0)


class SpeculationSettings(msgspec.Struct, frozen=True):
    """All settings that decide drafts, besides requests and their outcomes; a step log begins with them.

    Attributes:
        step_costs: seconds of steps by their number of tokens, measured at the start; see `StepCosts`.
    """

    config: SpeculativeConfig
    step_costs: list[tuple[int, float]]


def parse_config(text: str | None) -> SpeculativeConfig | None:
    """Parse the name of a method or a JSON object; None if empty.

    Raises:
        InvalidConfig: the JSON is broken, has a field or a method that is unknown, or values that exclude each other.
    """
    if text is None or text.lower() in ("", "none", "null"):
        return None
    try:
        given = {"method": text.lower()} if text.isidentifier() else msgspec.json.decode(text, type=dict)
        method = str(given.get("method", ""))
        if method in OTHER_HEADS:
            raise InvalidConfig(
                f"--speculative-config: there is no drafter {method}; of heads that take the model's hidden states "
                "EAGLE-3 and MTP are supported: take eagle3, mtp, draft_model, suffix or ngram"
            )
        if method in _METHOD_NAMES:
            given["method"] = _METHOD_NAMES[method]
        elif not method and given.get("model"):
            given["method"] = "draft_model"
        config = msgspec.convert(given, SpeculativeConfig)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise InvalidConfig(f"--speculative-config: {error}") from error
    _check(config)
    return config if given else None


def _check(config: SpeculativeConfig) -> None:
    if not 0 <= config.num_speculative_tokens <= MOST_TOKENS:
        _refuse(f"num_speculative_tokens must be 0 (as many as suit the method) to {MOST_TOKENS}")
    if not 1 <= config.prompt_lookup_min <= config.prompt_lookup_max <= MOST_TOKENS:
        _refuse(f"prompt_lookup_min and prompt_lookup_max must be 1 to {MOST_TOKENS}, the first not above the second")
    if not 6 <= config.suffix_decoding_max_tree_depth <= 256 or config.suffix_decoding_max_cached_requests < 0:
        _refuse("suffix_decoding_max_tree_depth must be 6 to 256, suffix_decoding_max_cached_requests 0 or more")
    if (
        not 0.0 <= config.suffix_decoding_min_token_prob <= 1.0
        or not 0.0 < config.suffix_decoding_max_spec_factor <= 32
    ):
        _refuse("suffix_decoding_min_token_prob must be in [0, 1], suffix_decoding_max_spec_factor above 0, at most 32")
    if (config.method in WITH_MODEL) != (config.model is not None):
        _refuse("the methods draft_model and eagle3 need a model, and other methods take none")
    if config.quantization is not None and not config.loads_weights:
        _refuse("quantization is for the methods with weights: draft_model, eagle3 and mtp")
    if config.draft_tensor_parallel_size != 1:
        _refuse("draft_tensor_parallel_size must be 1: the first rank drafts alone")
    if config.eagle_aux_hidden_state_layer_ids and config.method != "eagle3":
        _refuse("eagle_aux_hidden_state_layer_ids is for the method eagle3")


def _refuse(why: str) -> None:
    raise InvalidConfig(f"--speculative-config: {why}")


def settled(config: SpeculativeConfig | None, is_accelerator: bool) -> SpeculativeConfig | None:
    """Return the config with `auto` replaced by a method; None: no speculation."""
    if config is None or config.method != "auto":
        return config
    return None if is_accelerator else msgspec.structs.replace(config, method="suffix")
