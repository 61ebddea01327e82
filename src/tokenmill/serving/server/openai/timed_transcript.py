"""Write transcripts with times: Whisper's own marks of time become segments, in OpenAI's JSON, SRT or WebVTT.

Between two marks stands what is said from the one to the other; each piece of a long sound counts from its own start.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import msgspec

from tokenmill.core.messages import TextOutput
from tokenmill.serving.server.generation.writer import UsageCounter
from tokenmill.serving.server.openai.transcript import TranscriptWriter

_TIME = re.compile(r"<\|(\d+\.\d\d)\|>")
_MARK = re.compile(r"<\|[^|>]*\|>")


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """The frame of a transcript with times.

    Attributes:
        form: `verbose_json`, `srt` or `vtt`. task: `transcribe` or `translate`.
        seconds: lengths of the pieces of the sound.
        times_begin: the id of the mark of the time 0; all marks follow.
    """

    form: str
    task: str
    language: str
    temperature: float
    seconds: Sequence[float]
    times_begin: int


class Segment(msgspec.Struct, kw_only=True):
    """OpenAI's object of a segment. `seek`: its piece's start in frames; `no_speech_prob` is not known."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float | None = None


class DurationUsage(msgspec.Struct, tag="duration"):
    """OpenAI's object `usage` of a model that is billed by seconds."""

    seconds: int


class VerboseTranscript(msgspec.Struct):
    """The reply of the routes with `verbose_json`."""

    task: str
    language: str
    duration: float
    text: str
    segments: list[Segment]
    usage: DurationUsage


class TimedTranscriptWriter(TranscriptWriter):
    """A `ReplyWriter` for transcripts with times; it does not stream."""

    def __init__(self, timing: Timing, num_audio_tokens: int, joint: str) -> None:
        super().__init__(False, num_audio_tokens, joint)
        self._timing = timing

    def document(self, outputs: Mapping[int, TextOutput], usage: UsageCounter) -> bytes:
        """Return the transcript in the form that was asked for."""
        timing = self._timing
        segments: list[Segment] = []
        starts = [0.0, *accumulate(timing.seconds)]
        for index in sorted(outputs):
            segments += self._segments(outputs[index], starts[index], timing.seconds[index], len(segments))
        if timing.form != "verbose_json":
            return _captions(segments, timing.form).encode()
        text = self._joined([_MARK.sub("", outputs[index].text) for index in sorted(outputs)])
        duration = sum(timing.seconds)
        billed = DurationUsage(-int(-duration // 1))
        return msgspec.json.encode(
            VerboseTranscript(timing.task, timing.language, round(duration, 3), text, segments, billed)
        )

    def _segments(self, output: TextOutput, offset: float, seconds: float, first: int) -> Iterator[Segment]:
        """Yield what stands between two marks; the prompt has made the first one, of the time 0."""
        logprobs = [one.sampled.logprob for one in output.logprobs or ()]
        parts, ids = _TIME.split(output.text), output.token_ids
        places = [place for place, token_id in enumerate(ids) if token_id >= self._timing.times_begin]
        begins, ends = [0, *(place + 1 for place in places)], [*places, len(ids)]
        start = 0.0
        for number, text in enumerate(parts[::2]):
            has_end = 2 * number + 1 < len(parts)
            end = min(float(parts[2 * number + 1]), seconds) if has_end else seconds
            words = _MARK.sub("", text)
            if words.strip() and number < len(begins):
                own = slice(begins[number], ends[number])
                yield self._segment(first, words, (offset, start, max(start, end)), ids[own], logprobs[own])
                first += 1
            start = end

    def _segment(
        self, number: int, text: str, times: tuple[float, float, float], ids: list[int], logprobs: list[float]
    ) -> Segment:
        """Return a segment; `times`: the start of its piece, its own start and end within that."""
        data, (offset, start, end) = text.encode(), times
        return Segment(
            id=number,
            seek=round(offset * 100),
            start=round(offset + start, 2),
            end=round(offset + end, 2),
            text=text,
            tokens=ids,
            temperature=self._timing.temperature,
            avg_logprob=sum(logprobs) / max(1, len(logprobs)),
            compression_ratio=len(data) / len(zlib.compress(data)),
        )


def _captions(segments: Sequence[Segment], form: str) -> str:
    """Return segments as SRT, or as WebVTT."""
    is_srt = form == "srt"
    captions = [] if is_srt else ["WEBVTT\n"]
    for number, segment in enumerate(segments, 1):
        # A blank line would end the caption, and an arrow would begin another.
        text = " ".join(segment.text.split()).replace("-->", "->")
        head = f"{number}\n" if is_srt else ""
        captions.append(f"{head}{_clock(segment.start, is_srt)} --> {_clock(segment.end, is_srt)}\n{text}\n")
    return "\n".join(captions)


def _clock(seconds: float, is_srt: bool) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{',' if is_srt else '.'}{rest % 1000:03}"
