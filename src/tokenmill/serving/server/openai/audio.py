"""Serve POST /v1/audio/transcriptions and /v1/audio/translations: a file of sound in, its words out.

A model that chats about sound is asked for the words by a fixed sentence, that of its makers' own tests. Sound longer
than the model hears at once is cut where it is quiet; the pieces run beside each other, and their texts are joined.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field
from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.data_url import data_url
from tokenmill.core.errors import InvalidRequest, TooLarge
from tokenmill.core.messages import GenerateText
from tokenmill.model.audio.decoding import SoundDecoder
from tokenmill.model.audio.pieces import pieces, wav_file
from tokenmill.model.audio.resample import Samples
from tokenmill.model.audio.spec import RATE, num_tokens
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, messages_of
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.openai.transcript import TranscriptWriter
from tokenmill.serving.server.openai.upload import Upload

# OpenAI's limit of a file, what stands around it, and the most seconds of a file.
MOST_FILE_BYTES, _ENVELOPE_BYTES, MOST_SECONDS = 25 << 20, 64 << 10, 600.0
_LANGUAGE = re.compile("[a-z]{2,3}")
# Languages whose words are not separated by spaces.
_UNSPACED = ("zh", "ja")

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


class AudioRoutes:
    """The handlers of the routes that write down sound."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._decoder = SoundDecoder()

    async def transcribe(self, request: Request) -> Response:
        """Write down what is said."""
        return await self._answer(request, TranscriptionForm)

    async def translate(self, request: Request) -> Response:
        """Write down in English what is said."""
        return await self._answer(request, TranslationForm)

    async def _answer(self, request: Request, kind: type[TranslationForm]) -> Response:
        context = self._context
        if not context.ready.max_clip_seconds:
            raise InvalidRequest(f"the model `{context.model_name}` takes no sound, so it cannot write it down", "file")
        form, data = await self._read(request, kind)
        context.check_model(form.model)
        _refuse(form)
        samples = await asyncio.to_thread(self._decoder.decode, data, MOST_SECONDS, "file")
        call = _call(form)
        most = int(context.ready.max_clip_seconds * RATE)
        cut = list(pieces(samples, most))
        prompts = await asyncio.to_thread(self._prompts, form, call, cut)
        language = form.language if isinstance(form, TranscriptionForm) else "en"
        is_plain = form.response_format == "text"
        writer = TranscriptWriter(is_plain, _num_audio_tokens(cut), "" if language in _UNSPACED else " ")
        reply = GenerationReply(context, call, prompts, writer, f"trsc-{request.state.request_id}")
        reply.content_type = b"text/plain; charset=utf-8" if is_plain else b"application/json"
        return reply

    async def _read(self, request: Request, kind: type[TranslationForm]) -> tuple[TranslationForm, bytes]:
        """Return the fields of a body and its file, which is within the budget of all bodies."""
        most, budget = MOST_FILE_BYTES + _ENVELOPE_BYTES, self._context.bodies
        declared = request.headers.get("content-length", "")
        too_large = TooLarge(f"a file of sound has at most {MOST_FILE_BYTES} bytes", "file")
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        async with budget.open() as body:
            async for part in request.stream():
                if len(body.data) + len(part) > most:
                    raise too_large
                body.add(part)
            file = bytearray()
            upload = Upload(file.extend, kind)
            form = await budget.threads.run(len(body.data), lambda: upload.parse(request, body.data))
        return form, bytes(file)

    def _prompts(self, form: TranslationForm, call: GenerationCall, cut: Iterable[Samples]) -> list[GenerateText]:
        question = {"type": "text", "text": _question(form)}
        prompts: list[GenerateText] = []
        for piece in cut:
            clip = {"type": "audio_url", "audio_url": {"url": data_url(wav_file(piece))}}
            own = msgspec.structs.replace(call, messages=[{"role": "user", "content": [clip, question]}])
            prompts += messages_of(own, self._context)
        return prompts


def _call(form: TranslationForm) -> GenerationCall:
    return GenerationCall(
        params={"temperature": form.temperature or 0.0},
        stream=isinstance(form, TranscriptionForm) and bool(form.stream),
        model=form.model,
    )


def _question(form: TranslationForm) -> str:
    """Return the sentence by which Qwen2-Audio's makers ask for words; the language stands behind it as a mark."""
    if not isinstance(form, TranscriptionForm):
        return "Detect the language and translate the speech into English:"
    mark = f" <|{form.language}|>" if form.language else ""
    return f"Detect the language and recognize the speech:{mark}"


def _refuse(form: TranslationForm) -> None:
    """Refuse by name what this kind of model cannot do.

    Raises:
        InvalidRequest: naming the field.
    """
    if form.response_format not in (None, "json", "text"):
        name = form.response_format
        raise InvalidRequest(f"response_format {name} needs times, which this model does not tell", "response_format")
    if form.prompt:
        raise InvalidRequest("prompt is not supported: this model is asked by a fixed sentence", "prompt")
    if not isinstance(form, TranscriptionForm):
        return
    if form.timestamp_granularities:
        raise InvalidRequest("timestamp_granularities: this model does not tell times", "timestamp_granularities[]")
    if form.include:
        raise InvalidRequest("include: log probabilities of transcripts are not supported", "include[]")
    if form.chunking_strategy not in (None, "auto"):
        raise InvalidRequest("chunking_strategy: only auto is supported", "chunking_strategy")
    if form.language is not None and not _LANGUAGE.fullmatch(form.language):
        raise InvalidRequest("language is a code of ISO 639, such as en", "language")


def _num_audio_tokens(cut: Iterable[Samples]) -> int:
    return sum(num_tokens(len(piece)) for piece in cut)
