"""Load a text processor: the tokenizer, the chat template and what else of a checkpoint's folder it takes."""

from __future__ import annotations

from pathlib import Path

from tokenmill.config.configs import EngineConfig
from tokenmill.config.model_files import eos_token_ids
from tokenmill.demo import demo_model_path
from tokenmill.model.audio.prompts import SoundReader
from tokenmill.model.audio.spec import AudioSpec, read_audio
from tokenmill.model.audio.transcription import transcript_template
from tokenmill.model.vision.prompts import ImageReader
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.serving.frontend.chat_template import ChatTemplate, load_chat_template
from tokenmill.serving.frontend.media_prompts import MediaPrompts
from tokenmill.serving.frontend.text_processor import TextProcessor
from tokenmill.serving.frontend.tokenizer import Tokenizer

# The demo model is too small to end every text that it begins.
DEMO_STRING_LENGTH = 80


def load_text_processor(
    folder: Path,
    config: EngineConfig,
    chat_template_file: str | None = None,
    worker: str = "",
) -> TextProcessor:
    """Load a text processor from a checkpoint's folder, or with another tokenizer where one is configured.

    Raises:
        InvalidCheckpoint, InvalidConfig: a file is missing or broken; the message names it.
    """
    source = Path(config.tokenizer) if config.tokenizer else folder
    tokenizer = Tokenizer.load(source, config.vocabulary_folder)
    chat_template = load_chat_template(source, tokenizer.special_tokens, chat_template_file)
    audio = read_audio(folder)
    if chat_template is None and audio is not None and audio.is_whole:
        chat_template = ChatTemplate(transcript_template(tokenizer.token(audio.token_id) or ""))
    return TextProcessor(
        tokenizer,
        chat_template,
        worker,
        eos_token_ids=eos_token_ids(folder),
        any_whitespace=not config.structured_outputs().disable_any_whitespace,
        max_string_length=_max_string_length(folder, config),
        media=_media_prompts(folder, config, tokenizer, audio),
        caches_prefixes=config.enable_prefix_caching,
    )


def _media_prompts(
    folder: Path, config: EngineConfig, tokenizer: Tokenizer, audio: AudioSpec | None
) -> MediaPrompts | None:
    """Return the builder of prompts with images or sound, or None for a text model."""
    reader: ImageReader | SoundReader
    if config.language_model_only:
        return None
    if (vision := read_vision(folder)) is not None:
        special = {token_id: tokenizer.token(token_id) for token_id in vision.special_ids}
        names = {token_id: token for token_id, token in special.items() if token is not None}
        reader, typed = ImageReader(vision, config.media_limits(), names), list(names.values())
    elif audio is not None:
        reader = SoundReader(audio, config.media_limits())
        typed = [mark for mark in (tokenizer.token(audio.token_id), *audio.marks) if mark is not None]
    else:
        return None
    is_required = audio is not None and audio.is_whole
    return MediaPrompts(reader, lambda text: tokenizer.encode(text, add_special_tokens=False), typed, is_required)


def _max_string_length(folder: Path, config: EngineConfig) -> int:
    """Return the configured length; without one, only the demo model gets a bound."""
    if config.max_string_length is not None:
        return config.max_string_length
    return DEMO_STRING_LENGTH if folder == demo_model_path() else 0
