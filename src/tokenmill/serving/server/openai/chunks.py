"""Build what replies to chats and completions have in common: head, choices, usage, and fields about the prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from tokenmill.core.messages import PromptProgress, TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.timings import StreamTimer
from tokenmill.serving.server.generation.writer import DONE, PING, Usage, UsageCounter, finite, token_bytes
from tokenmill.serving.server.http.errors import error_body
from tokenmill.serving.server.openai.fields import GenerationFields

_ENCODER = msgspec.json.Encoder()


class ReplyHead(msgspec.Struct):
    """The fields at the beginning of every chunk of a reply, or of its one document."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChoiceEncoder(Protocol):
    """Turns outputs into the choices of one route; `index` numbers the choices of a call."""

    def chunk_choices(self, index: int, output: TextOutput) -> list[Any]:
        """Return the entries of `choices` in the chunk for a delta, or [] if no chunk is worth sending."""
        ...

    def choice(self, index: int, output: TextOutput) -> Any:
        """Return the entry of `choices` in the one document of a reply that is not streamed."""
        ...


class ChoiceWriter:
    """A `ReplyWriter` for OpenAI's documents and chunks; the head is encoded once."""

    ping = PING

    def __init__(
        self,
        head: ReplyHead,
        choices: ChoiceEncoder,
        call: GenerationCall,
        extras: Callable[[TextOutput], msgspec.Struct] | None = None,
    ) -> None:
        """Write replies; `extras` gives further fields, beside the choices, from an output."""
        self._head = head
        self._choices = choices
        self._call = call
        self._extras = extras
        self._timer = StreamTimer() if call.wants_timings else None
        self._wants_progress = call.wants_progress
        self._prefix = b"data: " + _ENCODER.encode(head)[:-1] + b',"choices":'
        self._no_usage = b',"usage":null}\n\n' if call.include_usage else b"}\n\n"

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the whole reply as JSON."""
        choices = [self._choices.choice(index, outputs[index]) for index in sorted(outputs)]
        whole = document(self._head, choices, usage.usage())
        return whole[:-1] + self._extra_fields(outputs[0]) + b"}"

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return the chunk for a delta, or b"" if it changes no choice."""
        if output.progress is not None:
            return self._progress(output.progress)
        if self._timer is not None:
            self._timer.note(output)
        choices = self._choices.chunk_choices(index, output)
        if not choices:
            return b""
        extras = self._extra_fields(output)
        if self._timer is not None:
            extras += self._timing_fields(self._timer, usage, is_end=output.finish_reason is not None)
        return self._chunk(choices, usage if self._call.continuous_usage else None, extras)

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return the chunk with the usage, if the client wants it, and `[DONE]`."""
        if not self._call.include_usage:
            return DONE
        timings = b"" if self._timer is None else self._timing_fields(self._timer, usage, is_end=True)
        return self._chunk([], usage, timings) + DONE

    def failure(self, error: Exception) -> bytes:
        """Return an error event and `[DONE]`."""
        return b"data: " + _ENCODER.encode(error_body(error)) + b"\n\n" + DONE

    def _extra_fields(self, output: TextOutput) -> bytes:
        fields = []
        if self._extras is not None and output.prompt is not None:
            fields.append(_ENCODER.encode(self._extras(output))[1:-1])
        if output.kv_transfer_params is not None:
            fields.append(b'"kv_transfer_params":' + _ENCODER.encode(output.kv_transfer_params))
        return b"".join(b"," + field for field in fields if field)

    def _progress(self, progress: PromptProgress) -> bytes:
        """Return a chunk without choices that tells how far the prompt is computed."""
        if self._timer is None:
            return b""
        return self._chunk([], None, b',"prompt_progress":' + _ENCODER.encode(self._timer.partial(progress)))

    def _timing_fields(self, timer: StreamTimer, usage: UsageCounter, is_end: bool) -> bytes:
        """Return the progress, with the first chunk, and the timings, with those that end something."""
        fields = b""
        if self._wants_progress:
            self._wants_progress = False
            fields = b',"prompt_progress":' + _ENCODER.encode(timer.progress(usage))
        return fields + (b',"timings":' + _ENCODER.encode(timer.timings(usage)) if is_end else b"")

    def _chunk(self, choices: list[Any], usage: UsageCounter | None, extras: bytes = b"") -> bytes:
        end = self._no_usage if usage is None else b',"usage":' + _ENCODER.encode(usage.usage()) + b"}\n\n"
        return self._prefix + _ENCODER.encode(choices) + extras + end


def document(head: ReplyHead, choices: list[Any], usage: Usage) -> bytes:
    """Return the body of a reply that is not streamed."""
    rest = _ENCODER.encode({"choices": choices, "usage": usage})
    return _ENCODER.encode(head)[:-1] + b"," + rest[1:]


def finish_reason_text(reason: FinishReason | None) -> str | None:
    """Return OpenAI's word for a finish reason."""
    return None if reason is None else reason.value


class PromptLogprob(msgspec.Struct):
    """The log probability of one token at a position of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


# For each token of the prompt: token id -> what is known of it; nothing is known of the first.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class PromptFields(msgspec.Struct, kw_only=True):
    """The fields of a reply about its prompt, without those that were not asked for."""

    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class PromptShown(msgspec.Struct, frozen=True):
    """The fields about the prompt that a client asked for."""

    logprobs: bool
    token_ids: bool

    @classmethod
    def from_fields(cls, body: GenerationFields) -> PromptShown:
        """Read them from a request's fields."""
        return cls(body.prompt_logprobs is not None, bool(body.return_token_ids))

    def fields(self, output: TextOutput) -> PromptFields:
        """Return the fields about the prompt for an output; empty if the output does not carry the prompt."""
        prompt = output.prompt
        if prompt is None:
            return PromptFields()
        return PromptFields(
            prompt_logprobs=_logprobs(output) if self.logprobs else UNSET,
            prompt_token_ids=prompt.token_ids if self.token_ids else UNSET,
        )


def _logprobs(output: TextOutput) -> PromptLogprobs:
    assert output.prompt is not None, "only outputs with a prompt have such"
    told: PromptLogprobs = [None]
    for position in output.prompt.logprobs or ():
        # Of a token that is both, the entry of the token that stands there comes first.
        told.append(
            {
                entry.token_id: PromptLogprob(
                    finite(entry.logprob), entry.rank, token_bytes(output, entry.token_id).decode("utf-8", "replace")
                )
                for entry in (position.sampled, *position.top)
            }
        )
    return told
