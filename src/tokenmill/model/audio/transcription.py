"""Read the way to ask Whisper: its languages, the tokens that it must not write, and the form of its prompts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidCheckpoint
from tokenmill.core.media import TRANSCRIPT_START, Transcription
from tokenmill.core.sampling_params import TimeRules
from tokenmill.model.audio.spec import AudioSpec

# From so many tokens on a vocabulary has those of languages: the smaller ones are of models for English.
_MULTILINGUAL = 51865

# The clip, what has been said before it, and what is asked for.
_TEMPLATE = """\
{%- set said = namespace(text='') -%}
{%- for message in messages -%}
{%- if message['content'] is string -%}{%- set said.text = said.text ~ message['content'] -%}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{%- set said.text = said.text ~ part['text'] -%}
{%- else -%}PLACEHOLDER{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
{%- if said.text | trim -%}<|startofprev|>{{ ' ' ~ said.text | trim }}{%- endif -%}
{{- decoder_prompt | default('START') -}}"""


class _Generation(msgspec.Struct):
    """The fields of generation_config.json that say how to ask."""

    lang_to_id: dict[str, int] = {}
    is_multilingual: bool | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    no_timestamps_token_id: int | None = None
    max_initial_timestamp_index: int | None = None


def read_transcription(folder: Path, spec: AudioSpec) -> Transcription | None:
    """Read how a model is asked that writes down sound; None: it is a model of another kind.

    Raises:
        InvalidCheckpoint: generation_config.json is broken, or does not say which languages there are.
    """
    if not spec.is_whole:
        return None
    fields = read_json(folder, "config.json")
    vocab_size = fields.get("vocab_size", _MULTILINGUAL)
    stated = {name: fields[name] for name in ("suppress_tokens", "begin_suppress_tokens") if name in fields}
    try:
        generation = msgspec.convert(stated | read_json(folder, "generation_config.json"), _Generation)
    except msgspec.ValidationError as error:
        raise InvalidCheckpoint(f"{folder / 'generation_config.json'}: {error}") from error
    is_multilingual = generation.is_multilingual
    if is_multilingual is None:
        is_multilingual = bool(generation.lang_to_id) or vocab_size >= _MULTILINGUAL
    languages = {token.strip("<|>"): token_id for token, token_id in generation.lang_to_id.items()}
    if is_multilingual and not languages:
        raise InvalidCheckpoint(
            f"{folder / 'generation_config.json'} has no lang_to_id, the tokens of the languages that the model knows: "
            "take the file from the model that this one was trained from"
        )

    def known(ids: list[int] | None) -> tuple[int, ...]:
        return tuple(token_id for token_id in ids or () if 0 <= token_id < vocab_size)

    return Transcription(
        languages=languages if is_multilingual else {},
        suppressed=known(generation.suppress_tokens),
        suppressed_first=known(generation.begin_suppress_tokens),
        num_tokens=spec.max_positions,
        time_rules=_time_rules(folder, generation, spec.token_id, vocab_size),
    )


def _time_rules(folder: Path, generation: _Generation, end: int, vocab_size: int) -> TimeRules | None:
    """Return the rules on marks of time; None where the tokenizer does not spell the mark of the time 0."""
    no_times = generation.no_timestamps_token_id
    added = read_json(folder, "tokenizer.json").get("added_tokens") or ()
    is_spelled = any(token.get("id") == (no_times or 0) + 1 and token.get("content") == "<|0.00|>" for token in added)
    if no_times is None or not is_spelled:
        return None
    most = generation.max_initial_timestamp_index
    return TimeRules(no_times + 1, end, vocab_size - 1 if most is None else no_times + 1 + most)


def transcript_template(placeholder: str) -> str:
    """Return the chat template that makes Whisper's prompts: a clip; the variable `decoder_prompt` stands last."""
    return _TEMPLATE.replace("PLACEHOLDER", placeholder).replace("START", TRANSCRIPT_START)
