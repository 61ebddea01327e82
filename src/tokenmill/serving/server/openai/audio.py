"""Serve POST /v1/audio/transcriptions and /v1/audio/translations: a file of sound in, its words out.

Sound longer than the model hears at once is cut where it is quiet; the pieces run beside each other, and their texts
are joined. How a model is asked for words is the matter of `Questions`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.core.errors import InvalidRequest, TooLarge
from tokenmill.model.audio.decoding import SoundDecoder
from tokenmill.model.audio.pieces import pieces
from tokenmill.model.audio.resample import Samples
from tokenmill.model.audio.spec import RATE
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.openai.audio_forms import (
    TIMED,
    TranscriptionForm,
    TranslationForm,
    check_form,
    is_streamed,
)
from tokenmill.serving.server.openai.audio_questions import Questions, SentenceQuestions, TokenQuestions
from tokenmill.serving.server.openai.timed_transcript import TimedTranscriptWriter, Timing
from tokenmill.serving.server.openai.transcript import TranscriptWriter
from tokenmill.serving.server.openai.upload import Upload

# OpenAI's limit of a file, what stands around it, and the most seconds of a file.
MOST_FILE_BYTES, _ENVELOPE_BYTES, MOST_SECONDS = 25 << 20, 64 << 10, 600.0
# Languages whose words are not separated by spaces.
_UNSPACED = ("zh", "ja")
_TYPES = {"text": b"text/plain", "srt": b"text/plain", "vtt": b"text/vtt"}


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

    @property
    def _questions(self) -> Questions:
        context = self._context
        transcription = context.ready.transcription
        return SentenceQuestions(context) if transcription is None else TokenQuestions(context, transcription)

    async def _answer(self, request: Request, kind: type[TranslationForm]) -> Response:
        context = self._context
        if not context.ready.max_clip_seconds:
            raise InvalidRequest(f"the model `{context.model_name}` takes no sound, so it cannot write it down", "file")
        form, data = await self._read(request, kind)
        context.check_model(form.model)
        check_form(form)
        questions = self._questions
        questions.check(form)
        samples = await asyncio.to_thread(self._decoder.decode, data, MOST_SECONDS, "file")
        call = GenerationCall(
            params={"temperature": form.temperature or 0.0}, stream=is_streamed(form), model=form.model
        )
        cut = list(pieces(samples, int(context.ready.max_clip_seconds * RATE)))
        num_audio_tokens = sum(map(questions.num_tokens, cut))
        asked = await questions.ask(form, call, cut, request.scope)
        writer = self._writer(form, asked.language, cut, num_audio_tokens)
        reply = GenerationReply(context, call, asked.prompts, writer, f"trsc-{request.state.request_id}")
        kind_of_text = _TYPES.get(form.response_format or "")
        reply.content_type = b"application/json" if kind_of_text is None else kind_of_text + b"; charset=utf-8"
        return reply

    def _writer(
        self, form: TranslationForm, language: str, cut: Sequence[Samples], num_audio_tokens: int
    ) -> TranscriptWriter:
        joint = "" if language in _UNSPACED else " "
        transcription = self._context.ready.transcription
        if form.response_format not in TIMED or transcription is None or transcription.time_rules is None:
            return TranscriptWriter(form.response_format == "text", num_audio_tokens, joint)
        task = "transcribe" if isinstance(form, TranscriptionForm) else "translate"
        timing = Timing(
            form=form.response_format,
            task=task,
            language=language,
            temperature=form.temperature or 0.0,
            seconds=[len(piece) / RATE for piece in cut],
            times_begin=transcription.time_rules.begin,
        )
        return TimedTranscriptWriter(timing, num_audio_tokens, joint)

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
