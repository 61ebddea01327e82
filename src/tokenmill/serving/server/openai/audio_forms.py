"""The fields of POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from tokenmill.core.errors import InvalidRequest

_LANGUAGE = re.compile("[a-z]{2,3}")
# Forms of replies that say when something is said.
TIMED = ("verbose_json", "srt", "vtt")

Temperature = Annotated[float, Meta(ge=0, le=2)]
Format = Literal["json", "text", "srt", "verbose_json", "vtt", "diarized_json"]


class TranslationForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a translation into English; of the file, its name."""

    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    model: str | None = None
    prompt: str | None = None
    response_format: Format | None = None
    temperature: Temperature | None = None


class TranscriptionForm(TranslationForm, forbid_unknown_fields=True, kw_only=True):
    """The fields of a transcription."""

    language: str | None = None
    stream: bool | None = None
    timestamp_granularities: list[str] = field(default_factory=list, name="timestamp_granularities[]")
    include: list[str] = field(default_factory=list, name="include[]")
    chunking_strategy: Any = None


def language_of(form: TranslationForm) -> str | None:
    """Return the language that a client says is spoken; None: it does not say."""
    return form.language if isinstance(form, TranscriptionForm) else None


def is_streamed(form: TranslationForm) -> bool:
    """Return True if a client asks for events."""
    return isinstance(form, TranscriptionForm) and bool(form.stream)


def check_form(form: TranslationForm) -> None:
    """Refuse by name what no model here can do.

    Raises:
        InvalidRequest: naming the field.
    """
    if form.response_format == "diarized_json":
        raise InvalidRequest("response_format diarized_json: speakers are not told apart", "response_format")
    if not isinstance(form, TranscriptionForm):
        return
    if form.include:
        raise InvalidRequest("include: log probabilities of transcripts are not supported", "include[]")
    if form.chunking_strategy not in (None, "auto"):
        raise InvalidRequest("chunking_strategy: only auto is supported", "chunking_strategy")
    if form.language is not None and not _LANGUAGE.fullmatch(form.language):
        raise InvalidRequest("language is a code of ISO 639, such as en", "language")
