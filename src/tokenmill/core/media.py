"""Media in a prompt: the places of their placeholders, their contents, and the ids that tell their tokens apart.

A prompt holds one placeholder for each embedding of an image or of sound. All placeholders of all images are the same
token, so code that compares tokens (the radix tree, the disk tier, the router) would take two of a size for the same.
On its way through the engine a placeholder is therefore a *surrogate*: an id above every vocabulary, made of the hash
of the content and of its place in it. The model is given the placeholder itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b, shake_256
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.sampling_params import TimeRules

# No vocabulary is as large, and ids stay int32. The bits below it are the content's.
SURROGATE = 1 << 30

TRANSCRIPT_START = "<|startoftranscript|>"
"""The token behind which Whisper names the language."""


class MediaSpan(NamedTuple):
    """One image in a prompt, frames of a video that are encoded as one, or a clip of sound.

    Attributes:
        offset, length: its placeholders, in tokens.
        digest: hash of its pixels, after it was resized, or of its samples, after they were resampled.
        rows, columns: patches of its grid; `length` is their product, less the patches that are merged. Sound: 0.
        token_id: the model's own placeholder.
        time, before: of frames of a video whose times are positions: their place in time, counted from the first; and
            how many placeholders of the video stand directly before theirs. Else 0.
    """

    offset: int
    length: int
    digest: str
    rows: int
    columns: int
    token_id: int
    time: int = 0
    before: int = 0

    @property
    def end(self) -> int:
        """Position of the token behind it."""
        return self.offset + self.length

    @property
    def noun(self) -> str:
        """Name its kind in a sentence."""
        return "an image" if self.rows else "a clip of sound"


class MediaInput(msgspec.Struct, array_like=True):
    """The content of a span of a request, as sent to the engine.

    Attributes:
        content: of an image [frames, height, width, 3] uint8, of sound [n] float32, 16,000 samples a second.
    """

    span: MediaSpan
    content: bytes


class Transcription(msgspec.Struct, frozen=True, kw_only=True):
    """The way to ask a model that writes down sound, and does nothing else (Whisper).

    Attributes:
        languages: code -> id of the token that names it; empty: the model knows English alone, and is told nothing.
        suppressed: ids that are never sampled. suppressed_first: ids that are not sampled first, besides.
        num_tokens: of a clip, in the prompt.
        time_rules: the marks of time that it writes where they are wanted; None: it has none.
    """

    languages: dict[str, int]
    suppressed: tuple[int, ...]
    suppressed_first: tuple[int, ...]
    num_tokens: int
    time_rules: TimeRules | None = None

    def prompt(self, language: str, task: str, *, has_times: bool = False) -> str:
        """Return the tokens behind which the words follow, among marks of time or without.

        Args:
            task: `transcribe` or `translate`.
        """
        asked = f"<|{language}|><|{task}|>" if self.languages else ""
        return f"{TRANSCRIPT_START}{asked}{'' if has_times else '<|notimestamps|>'}"


def content_digest(content: bytes, height: int, width: int, processor: str) -> str:
    """Hash a content, its shape and its preparation into 32 hexadecimal digits."""
    hash = blake2b(f"{processor}/{height}x{width}/".encode(), digest_size=16)
    hash.update(content)
    return hash.hexdigest()


def surrogate_ids(digest: str, length: int, time: int = 0, before: int = 0) -> npt.NDArray[np.int32]:
    """Return the ids of a content's placeholders, [length] int32: 30 bits of its hash and their place each.

    Args:
        time, before: see `MediaSpan`; the same frames at another time are other tokens.
    """
    content = f"{digest}/{time}/{before}" if time or before else digest
    numbers = np.frombuffer(shake_256(content.encode()).digest(4 * length), dtype=np.uint32)
    return (numbers % SURROGATE + SURROGATE).astype(np.int32)


def with_surrogates(token_ids: list[int], media: Sequence[MediaInput]) -> list[int]:
    """Return a prompt with surrogates instead of placeholders."""
    if not media:
        return token_ids
    ids = np.array(token_ids, dtype=np.int32)
    for span in (one.span for one in media):
        ids[span.offset : span.end] = surrogate_ids(span.digest, span.length, span.time, span.before)
    return list(ids.tolist())


def with_placeholders(
    token_ids: Sequence[int] | npt.NDArray[np.int32], spans: Sequence[MediaSpan]
) -> npt.NDArray[np.int32]:
    """Return a prompt as the model knows it: [n] int32, a copy."""
    ids = np.array(token_ids, dtype=np.int32)
    for span in spans:
        ids[span.offset : span.end] = span.token_id
    return ids


def without_contents(media: Sequence[MediaInput]) -> list[MediaInput]:
    """Return the spans without contents: all that a schedule depends on, so that images and sound stay out of logs."""
    return [MediaInput(one.span, b"") for one in media]
