"""Sampling parameters of a client: one frozen, validated struct that crosses process boundaries as it is.

It does not know tokenizers, vocabularies or devices; checks that need those (ids inside the vocabulary, room in the
context) are made where the prompt is encoded.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.names import refuse_unknown
from tokenmill.core.structured_outputs import StructuredOutputs, read_form

MAX_N = 128
MAX_STOP_STRINGS = 4
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_BAD_WORDS = 128
MAX_BAD_WORD_LENGTH = 256
# What the arrays of a step can hold.
MAX_INT = 2**31 - 1

# What a checkpoint's generation_config.json may recommend.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class _NamedFields(msgspec.StructMeta):
    """Suggests a name for an unknown field, and drops vLLM's fields whose values ask for nothing."""

    def __call__(self, *values: Any, **fields: Any) -> Any:
        for name in fields.keys() - set(self.__struct_fields__):
            refuse_unknown("field", self.__name__, (name, fields.pop(name)), self.__struct_fields__, TypeError)
        return super().__call__(*values, **fields)


class ThinkingBudget(msgspec.Struct, frozen=True):
    """The most tokens of thinking in an answer, and how it ends then.

    Attributes:
        begin, end: the ids that mark thinking.
        forced: the ids that end it: of a message to the model, and `end`.
        has_begun: the prompt has begun it.
    """

    most: int
    begin: tuple[int, ...]
    end: tuple[int, ...]
    forced: tuple[int, ...]
    has_begun: bool


class Grammar(msgspec.Struct, frozen=True):
    """The grammar that the output of a request must match.

    Attributes:
        text: in llguidance's JSON form; the frontend builds it.
        param: the field of the request it came from, for error messages.
        is_optional: where it cannot be compiled, the request goes without.
        marks: texts without which free text stays free; None: not known, or no text is free. See `Openings`.
        thinking: ends the thinking within it; None: it may go on.
    """

    text: str
    param: str
    is_optional: bool = False
    marks: tuple[str, ...] | None = None
    thinking: ThinkingBudget | None = None


class TimeRules(msgspec.Struct, frozen=True):
    """The marks of time that an output has among its words (Whisper's).

    Attributes:
        begin: id of the mark of the time 0; those of later times follow it, and nothing else does.
        end: id of the end of a text; those of words are below it.
        last_first: the latest mark that an output may begin with.
    """

    begin: int
    end: int
    last_first: int


class SamplingParams(msgspec.Struct, metaclass=_NamedFields, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of one request. Those with a description are also flags of the command line.

    A field that is a tuple also takes a list, `stop` a single string, and `structured_outputs` a dict of its fields.

    Attributes:
        n: number of continuations of the prompt; each becomes a request of its own.
        max_tokens: output tokens at most; None: until a stop or the end of the context.
        min_tokens: EOS and stop token ids are masked until this many tokens are out.
        temperature: 0 is greedy: the exact argmax.
        top_k: 0 or -1: off.
        seed: draws are keyed by (seed, position); None: one made of the engine's `--seed` and the order of arrival.
        stop: strings that end the text; matched on text by the frontend, across token borders.
        stop_token_ids: ids that end the text, besides the model's EOS ids.
        logit_bias: token id -> value added to its logit, clamped to +-100.
        thinking_token_budget: tokens of thinking at most, of a model that thinks; None: any number.
        structured_outputs: the form of the answer, which ends only once it is complete.
        grammar: the same as the engine needs it; the text worker makes it, not the client.
        logprobs: report this many most likely tokens and the sampled one at each position; 0: only the sampled one.
        prompt_logprobs: likewise at each position of the prompt but the first. Such a prompt is computed from its
            start, whatever the prefix cache holds.
        allowed_token_ids: only these may be sampled; None: any.
        bad_words: texts that the output must not contain, as far as they come in the tokens they are encoded to.
        bad_word_ids: the same as the engine needs it; the text worker makes it, not the client.
        first_bad_ids: ids that the output must not begin with, for models that ask for it; not the client's.
        time_rules: the output has marks of time, and is held to their rules; not the client's.

    Raises:
        InvalidRequest: a value outside its range; `param` names the field.
        TypeError: there is no such field; suggests a similar one.
    """

    n: int = 1
    max_tokens: Annotated[int | None, Meta(description="tokens of the answer at most")] = None
    min_tokens: int = 0
    temperature: Annotated[float, Meta(description="0: always the most likely token")] = 1.0
    top_p: Annotated[
        float, Meta(description="sample from the most likely tokens that hold this share of probability")
    ] = 1.0
    top_k: Annotated[int, Meta(description="sample from this many most likely tokens")] = 0
    min_p: Annotated[float, Meta(description="drop tokens less likely than this share of the most likely one")] = 0.0
    presence_penalty: Annotated[float, Meta(description="make tokens that occurred less likely")] = 0.0
    frequency_penalty: Annotated[float, Meta(description="make tokens less likely each time they occur")] = 0.0
    repetition_penalty: Annotated[float, Meta(description="scale down tokens that occurred, in prompt or answer")] = 1.0
    seed: Annotated[int | None, Meta(description="the same seed gives the same answer")] = None
    stop: Annotated[tuple[str, ...], Meta(description="end before this text; may be repeated")] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    first_bad_ids: tuple[int, ...] = ()
    time_rules: TimeRules | None = None
    thinking_token_budget: Annotated[int | None, Meta(description="tokens of thinking at most")] = None
    structured_outputs: StructuredOutputs | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self._make_tuples()
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            msgspec.structs.force_setattr(self, "structured_outputs", read_form(self.structured_outputs))
        _check_int("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_INT)
        _check_int("min_tokens", self.min_tokens, 0, MAX_INT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        _check_number("temperature", self.temperature, 0.0, 2.0)
        _check_number("top_p", self.top_p, 0.0, 1.0, above_low=True)
        _check_int("top_k", self.top_k, -1, MAX_INT)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, above_low=True)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        self._check_stops()
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS_ENTRIES}", "logit_bias"
            )
        for token_id, value in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0)
            _check_number("logit_bias", value, -math.inf, math.inf)
        if self.thinking_token_budget is not None:
            _check_int("thinking_token_budget", self.thinking_token_budget, 0, MAX_INT)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        self._check_token_rules()
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidRequest("ignore_eos: a structured answer ends where it is complete", "ignore_eos")

    def _make_tuples(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = [self.stop] if name == "stop" and isinstance(self.stop, str) else getattr(self, name)
            if isinstance(value, list) or (value is None and name != "allowed_token_ids"):
                msgspec.structs.force_setattr(self, name, tuple(value or ()))
            elif not isinstance(value, tuple | None):
                raise InvalidRequest(f"{name} must be a list, got {type(value).__name__}", name)

    def _check_stops(self) -> None:
        if not all(isinstance(s, str) for s in self.stop):
            raise InvalidRequest("stop must be a string or a list of strings", "stop")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}", "stop")
        if "" in self.stop:
            raise InvalidRequest("a stop string must not be empty", "stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids", "stop_token_ids")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0)

    def _check_token_rules(self) -> None:
        if self.allowed_token_ids is not None:
            if not 0 < len(self.allowed_token_ids) <= MAX_ALLOWED_TOKEN_IDS:
                raise InvalidRequest(
                    f"allowed_token_ids must name 1 to {MAX_ALLOWED_TOKEN_IDS} tokens", "allowed_token_ids"
                )
            for token_id in self.allowed_token_ids:
                _check_int("allowed_token_ids", token_id, 0)
        if not all(isinstance(word, str) for word in self.bad_words):
            raise InvalidRequest("bad_words must be a list of strings", "bad_words")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequest(f"at most {MAX_BAD_WORDS} bad_words, got {len(self.bad_words)}", "bad_words")
        for word in self.bad_words:
            if not 0 < len(word.strip()) <= len(word) <= MAX_BAD_WORD_LENGTH:
                raise InvalidRequest(
                    f"a bad word must have 1 to {MAX_BAD_WORD_LENGTH} characters, not only spaces", "bad_words"
                )

    @property
    def is_filtered(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary that depends on all logits."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def is_greedy(self) -> bool:
        """True when the token is the exact argmax of the processed logits."""
        return self.temperature == 0.0 or self.top_k == 1

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside `0..vocab_size-1`: they would index past a row.

        Raises:
            InvalidRequest: naming the field and the id.
        """
        for field, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("first_bad_ids", self.first_bad_ids),
        ):
            for token_id in ids:
                if token_id >= vocab_size:
                    raise InvalidRequest(
                        f"{field}: token id {token_id} is outside the vocabulary of {vocab_size}", field
                    )


def _check_int(field: str, value: object, low: int, high: int | None = None) -> None:
    # bool is an int in Python; `"n": true` in a body is a mistake, not a 1.
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{field} must be an integer, got {type(value).__name__}", field)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequest(f"{field} must be {bounds}, got {value}", field)


def _check_number(field: str, value: object, low: float, high: float, above_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{field} must be a number, got {type(value).__name__}", field)
    if (isinstance(value, int) and abs(value) > MAX_INT) or not math.isfinite(value):
        raise InvalidRequest(f"{field} must be finite", field)
    if value > high or value < low or (above_low and value == low):
        open_bracket = "(" if above_low else "["
        raise InvalidRequest(f"{field} must be in {open_bracket}{low:g}, {high:g}], got {value:g}", field)
