"""Write transcripts in OpenAI's form: the texts of several pieces, in their order, whole or as events."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from tokenmill.core.messages import TextOutput
from tokenmill.serving.server.generation.writer import DONE, PING, UsageCounter
from tokenmill.serving.server.http.errors import error_body

# A mark of the language before the words, which the model writes where the client has named none.
_MARK = re.compile(r"\s*<\|[a-zA-Z-]{2,12}\|>\s*")
_MARK_BEGUN = re.compile(r"\s*(<(\|[a-zA-Z-]{0,12}(\|>?)?)?)?")


class InputDetails(msgspec.Struct):
    """OpenAI's object `input_token_details`."""

    audio_tokens: int
    text_tokens: int


class TranscriptUsage(msgspec.Struct, tag="tokens"):
    """OpenAI's object `usage` of a model that is billed by tokens."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputDetails


class Transcript(msgspec.Struct):
    """The reply of the routes."""

    text: str
    usage: TranscriptUsage


class _Delta(msgspec.Struct, tag="transcript.text.delta"):
    delta: str


class _Done(msgspec.Struct, tag="transcript.text.done"):
    text: str
    usage: TranscriptUsage


class TranscriptWriter:
    """A `ReplyWriter` for transcripts; piece `index` of the sound is prompt `index` of the call.

    Args:
        is_plain: the reply is the text alone.
        num_audio_tokens: of all prompts.
        joint: what stands between the texts of two pieces.
    """

    ping = PING

    def __init__(self, is_plain: bool, num_audio_tokens: int, joint: str) -> None:
        self._is_plain = is_plain
        self._num_audio_tokens = num_audio_tokens
        self._joint = joint
        self._texts: dict[int, str] = {}
        self._ended: set[int] = set()
        self._sent = ""

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the transcript."""
        text = self._joined([outputs[index].text for index in sorted(outputs)])
        return text.encode() + b"\n" if self._is_plain else msgspec.json.encode(Transcript(text, self._usage(usage)))

    def events(self, index: int, output: TextOutput, usage: UsageCounter) -> bytes:
        """Return what follows on the text that was sent; what is said later waits for what was said before."""
        self._texts[index] = self._texts.get(index, "") + output.text
        if output.finish_reason is not None:
            self._ended.add(index)
        known = []
        for piece in range(len(self._texts)):
            is_ended = piece in self._ended
            text = self._texts.get(piece, "")
            known.append(text if is_ended or not _MARK_BEGUN.fullmatch(text) else "")
            if not is_ended:
                break
        return self._delta(self._joined(known))

    def last_events(self, usage: UsageCounter) -> bytes:
        """Return the rest, and the whole text again."""
        whole = self._joined([self._texts[index] for index in sorted(self._texts)])
        return self._delta(whole) + _event(_Done(whole, self._usage(usage))) + DONE

    def failure(self, error: Exception) -> bytes:
        """Return the event that ends a stream early."""
        return b"data: " + msgspec.json.encode(error_body(error)) + b"\n\n" + DONE

    def _joined(self, texts: list[str]) -> str:
        """Return texts in one, without marks and without spaces around them."""
        bare = (text[found.end() :] if (found := _MARK.match(text)) else text for text in texts)
        return self._joint.join(filter(None, map(str.strip, bare)))

    def _delta(self, text: str) -> bytes:
        if len(text) <= len(self._sent):
            return b""
        delta, self._sent = text[len(self._sent) :], text
        return _event(_Delta(delta))

    def _usage(self, usage: UsageCounter) -> TranscriptUsage:
        counted, sound = usage.usage(), self._num_audio_tokens
        details = InputDetails(sound, max(0, counted.prompt_tokens - sound))
        return TranscriptUsage(counted.prompt_tokens, counted.completion_tokens, counted.total_tokens, details)


def _event(event: _Delta | _Done) -> bytes:
    return b"data: " + msgspec.json.encode(event) + b"\n\n"
