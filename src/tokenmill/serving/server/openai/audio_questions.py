"""Ask a model for the words of sound: one that chats by a sentence, Whisper by the tokens of its prompts.

Each piece of the sound is a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from starlette.types import Scope

from tokenmill.core.data_url import data_url
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.media import TRANSCRIPT_START, Transcription
from tokenmill.core.messages import GenerateText
from tokenmill.model.audio.pieces import wav_file
from tokenmill.model.audio.resample import Samples
from tokenmill.model.audio.spec import num_tokens
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, messages_of
from tokenmill.serving.server.generation.placement import placed
from tokenmill.serving.server.generation.reply import caller_of, check_output
from tokenmill.serving.server.openai.audio_forms import TIMED, TranscriptionForm, TranslationForm, language_of


class Question(msgspec.Struct, frozen=True):
    """The prompts for the pieces of some sound, and the language of their answers."""

    prompts: list[GenerateText]
    language: str


class Questions(Protocol):
    """Makes the prompts for one model."""

    def check(self, form: TranslationForm) -> None:
        """Refuse by name what this kind of model cannot do.

        Raises:
            InvalidRequest: naming the field.
        """

    def num_tokens(self, piece: Samples) -> int:
        """Return how many tokens of a prompt a piece of sound takes."""

    async def ask(self, form: TranslationForm, call: GenerationCall, cut: Sequence[Samples], scope: Scope) -> Question:
        """Return the prompts for pieces of sound, with the parameters of `call`."""


class SentenceQuestions(Questions):
    """Asks a model that chats about sound, by the sentence of its makers' own tests."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def check(self, form: TranslationForm) -> None:
        """Refuse times and prompts."""
        if form.response_format in TIMED:
            name = form.response_format
            sentence = f"response_format {name} needs times, which this model does not tell"
            raise InvalidRequest(sentence, "response_format")
        if form.prompt:
            raise InvalidRequest("prompt is not supported: this model is asked by a fixed sentence", "prompt")
        if isinstance(form, TranscriptionForm) and form.timestamp_granularities:
            sentence = "timestamp_granularities: this model does not tell times"
            raise InvalidRequest(sentence, "timestamp_granularities[]")

    def num_tokens(self, piece: Samples) -> int:
        """Return the number of its embeddings."""
        return num_tokens(len(piece))

    async def ask(self, form: TranslationForm, call: GenerationCall, cut: Sequence[Samples], scope: Scope) -> Question:
        """Return a chat for each piece."""
        threads, size = self._context.bodies.threads, sum(piece.nbytes for piece in cut)
        text = _sentence(form)
        prompts = await threads.run(size, lambda: [self._prompt(call, piece, text) for piece in cut])
        return Question(prompts, language_of(form) or "" if isinstance(form, TranscriptionForm) else "en")

    def _prompt(self, call: GenerationCall, piece: Samples, text: str) -> GenerateText:
        return messages_of(msgspec.structs.replace(call, messages=_chat(piece, text)), self._context)[0]


class TokenQuestions(Questions):
    """Asks Whisper: by the language, the task, and what has been said before."""

    def __init__(self, context: ServerContext, transcription: Transcription) -> None:
        self._context = context
        self._transcription = transcription

    def check(self, form: TranslationForm) -> None:
        """Refuse languages that the model does not know, and times of words."""
        known, language = self._transcription.languages, language_of(form)
        if known and language is not None and language not in known:
            raise InvalidRequest(f"language {language}: the model knows {', '.join(sorted(known))}", "language")
        if not known and (language not in (None, "en") or not isinstance(form, TranscriptionForm)):
            raise InvalidRequest("this model knows English alone, and translates nothing", "language")
        if form.response_format in TIMED and self._transcription.time_rules is None:
            sentence = f"response_format {form.response_format}: this model's tokenizer has no times"
            raise InvalidRequest(sentence, "response_format")
        if not isinstance(form, TranscriptionForm):
            return
        if form.response_format in TIMED and form.stream:
            raise InvalidRequest(f"stream: events have no times; {form.response_format} is sent whole", "stream")
        if set(form.timestamp_granularities) - {"segment"}:
            sentence = "timestamp_granularities: times of segments are told, those of words are not"
            raise InvalidRequest(sentence, "timestamp_granularities[]")

    def num_tokens(self, piece: Samples) -> int:
        """Return the positions of any clip."""
        return self._transcription.num_tokens

    async def ask(self, form: TranslationForm, call: GenerationCall, cut: Sequence[Samples], scope: Scope) -> Question:
        """Return a prompt for each piece; find the language first, by the first piece, where nobody says it."""
        known, has_times = self._transcription, form.response_format in TIMED
        language = language_of(form) or ("en" if not known.languages else await self._heard(call, cut[0], scope))
        task = "transcribe" if isinstance(form, TranscriptionForm) else "translate"
        asked = known.prompt(language, task, has_times=has_times)
        extra: dict[str, Any] = {"logprobs": 0, "skip_special_tokens": False} if has_times else {}
        call = msgspec.structs.replace(call, params=call.params | extra)
        threads, size = self._context.bodies.threads, sum(piece.nbytes for piece in cut)
        parts = asked, form.prompt, has_times
        prompts = await threads.run(size, lambda: [self._prompt(call, piece, *parts) for piece in cut])
        return Question(prompts, language if task == "transcribe" else "en")

    async def _heard(self, call: GenerationCall, piece: Samples, scope: Scope) -> str:
        """Return the most likely language of a piece: one token behind the clip."""
        languages = self._transcription.languages
        params = {"temperature": 0.0, "max_tokens": 1, "allowed_token_ids": list(languages.values())}
        call = msgspec.structs.replace(call, params=params, stream=False)
        threads = self._context.bodies.threads
        prompt = await threads.run(piece.nbytes, lambda: self._prompt(call, piece, TRANSCRIPT_START, None))
        found: list[int] = []
        prompts = placed([prompt], self._context, scope, call)
        async with self._context.client.generate(prompts, caller_of(scope, "language")) as generation:
            async for _, output in generation:
                check_output(output)
                found += output.token_ids
        return next((code for code, token_id in languages.items() if token_id in found), "en")

    def _prompt(
        self, call: GenerationCall, piece: Samples, asked: str, before: str | None, has_times: bool = False
    ) -> GenerateText:
        own = msgspec.structs.replace(
            call, messages=_chat(piece, before or ""), template_kwargs={"decoder_prompt": asked}, is_transcript=True
        )
        (prompt,) = messages_of(own, self._context)
        known = self._transcription
        params = msgspec.structs.replace(
            prompt.params,
            bad_word_ids=tuple((token_id,) for token_id in known.suppressed),
            first_bad_ids=known.suppressed_first,
            time_rules=known.time_rules if has_times else None,
        )
        return msgspec.structs.replace(prompt, params=params)


def _chat(piece: Samples, text: str) -> list[dict[str, Any]]:
    clip = {"type": "audio_url", "audio_url": {"url": data_url(wav_file(piece))}}
    return [{"role": "user", "content": [clip, {"type": "text", "text": text}]}]


def _sentence(form: TranslationForm) -> str:
    """Return the sentence by which Qwen2-Audio's makers ask for words; the language stands behind it as a mark."""
    if not isinstance(form, TranscriptionForm):
        return "Detect the language and translate the speech into English:"
    mark = f" <|{form.language}|>" if form.language else ""
    return f"Detect the language and recognize the speech:{mark}"
