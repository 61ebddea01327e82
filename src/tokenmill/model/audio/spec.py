"""`AudioSpec`: an encoder of sound, its placeholder, and how its clips are prepared; read from a checkpoint's files.

Read by both sides: text workers prepare clips by it, the engine builds the encoder. Knows no torch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidCheckpoint, InvalidRequest

QWEN2_AUDIO, WHISPER = "Qwen2AudioForConditionalGeneration", "WhisperForConditionalGeneration"
# Samples a second; from one frame of the spectrogram to the next; and of each frame.
RATE, HOP, FRAME = 16_000, 160, 400
# Tokens of Whisper's prompts, which no client may type.
PROMPT_MARKS = (
    "<|startofprev|>",
    "<|startoftranscript|>",
    "<|transcribe|>",
    "<|translate|>",
    "<|notimestamps|>",
    "<|nospeech|>",
    "<|startoflm|>",
)
# The encoder takes two frames for a position, and averages two positions to an embedding.
_FRAMES_PER_POSITION, POOLED = 2, 2


class AudioSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An encoder of sound: two convolutions, learned positions, layers; then an average of two and a projection.

    Attributes:
        depth: layers. hidden_size, intermediate_size, num_heads: of each of them. out_size: of the text model.
        num_bins: frequencies of the spectrogram.
        max_positions: positions of the longest clip.
        token_id: the placeholder.
        marks: tokens that stand around it, as text.
        tower: prefix of the names of its weights.
        is_whole: it hears the silence to which a clip is padded, and its positions are the embeddings (Whisper).
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_size: int
    num_bins: int
    max_positions: int
    token_id: int
    marks: tuple[str, ...] = ("<|audio_bos|>", "<|audio_eos|>")
    tower: str = "audio_tower."
    is_whole: bool = False

    @property
    def max_samples(self) -> int:
        """Samples of the longest clip, to which all are padded."""
        return self.max_positions * _FRAMES_PER_POSITION * HOP

    @property
    def max_seconds(self) -> float:
        """Seconds of the longest clip."""
        return self.max_samples / RATE

    def num_positions(self, num_samples: int) -> int:
        """Return how many positions of the encoder a clip has."""
        return self.max_positions if self.is_whole else num_positions(num_samples)

    def num_tokens(self, num_samples: int) -> int:
        """Return how many embeddings, and so placeholders, a clip has.

        Raises:
            InvalidRequest: it is too short for any.
        """
        return self.max_positions if self.is_whole else num_tokens(num_samples)


def num_positions(num_samples: int) -> int:
    """Return how many positions of the encoder a clip has."""
    num_frames = -(-num_samples // HOP)
    return (num_frames - 1) // _FRAMES_PER_POSITION + 1


def num_tokens(num_samples: int) -> int:
    """Return how many embeddings, and so placeholders, a clip has.

    Raises:
        InvalidRequest: it is too short for any.
    """
    count = num_positions(num_samples) // POOLED
    if not count:
        raise InvalidRequest(f"a clip of {num_samples / RATE:.3f} s of sound is too short to be heard", "messages")
    return count


class _Encoder(msgspec.Struct, kw_only=True):
    """`audio_config`. Its defaults are transformers'."""

    d_model: int = 1280
    encoder_layers: int = 32
    encoder_ffn_dim: int = 5120
    encoder_attention_heads: int = 20
    num_mel_bins: int = 128
    max_source_positions: int = 1500
    activation_function: str = "gelu"
    scale_embedding: bool = False


class _Processor(msgspec.Struct, kw_only=True):
    """The config of transformers' WhisperFeatureExtractor; its defaults are the published model's."""

    feature_size: int = 128
    sampling_rate: int = RATE
    hop_length: int = HOP
    n_fft: int = FRAME
    chunk_length: int = 30
    dither: float = 0.0
    do_normalize: bool = False


class _Whisper(_Encoder, kw_only=True):
    """config.json of Whisper, whose encoder's fields stand among the others; its defaults are transformers'."""

    d_model: int = 384
    encoder_layers: int = 4
    encoder_ffn_dim: int = 1536
    encoder_attention_heads: int = 6
    num_mel_bins: int = 80
    eos_token_id: int = 50256


class _Text(msgspec.Struct):
    hidden_size: int = 4096


class _Model(msgspec.Struct, kw_only=True):
    audio_config: _Encoder = msgspec.field(default_factory=_Encoder)
    text_config: _Text = msgspec.field(default_factory=_Text)
    audio_token_index: int | None = None
    audio_token_id: int | None = None


def read_audio(folder: Path) -> AudioSpec | None:
    """Read the part of a checkpoint that hears; None: its model takes no sound.

    Raises:
        InvalidCheckpoint: it has one that is not supported; names the field.
    """
    fields = read_json(folder, "config.json")
    name = (fields.get("architectures") or [""])[0]
    if name not in (QWEN2_AUDIO, WHISPER):
        return None
    stored = read_json(folder, "preprocessor_config.json")
    stored = stored or read_json(folder, "processor_config.json").get("feature_extractor") or {}
    try:
        bins = {"feature_size": 80} if name == WHISPER else {}
        processor = msgspec.convert(bins | stored, _Processor) if stored else None
        if name == WHISPER:
            whisper = msgspec.convert(fields, _Whisper)
            _check(whisper, processor, folder, "")
            spec = _spec(whisper, whisper.d_model, whisper.eos_token_id)
            return msgspec.structs.replace(spec, marks=PROMPT_MARKS, tower="encoder.", is_whole=True)
        model = msgspec.convert(fields, _Model)
    except msgspec.ValidationError as error:
        raise InvalidCheckpoint(f"{folder}: {error}") from error
    _check(model.audio_config, processor, folder, "audio_config.")
    ids = (one for one in (model.audio_token_index, model.audio_token_id) if one is not None)
    return _spec(model.audio_config, model.text_config.hidden_size, next(ids, 151646))


def _spec(encoder: _Encoder, out_size: int, token_id: int) -> AudioSpec:
    return AudioSpec(
        depth=encoder.encoder_layers,
        hidden_size=encoder.d_model,
        intermediate_size=encoder.encoder_ffn_dim,
        num_heads=encoder.encoder_attention_heads,
        out_size=out_size,
        num_bins=encoder.num_mel_bins,
        max_positions=encoder.max_source_positions,
        token_id=token_id,
    )


def _check(encoder: _Encoder, processor: _Processor | None, folder: Path, part: str) -> None:
    """Raise InvalidCheckpoint for the first field with a value that is not supported. `part`: where they stand."""
    right = {
        f"{part}activation_function": encoder.activation_function == "gelu",
        f"{part}scale_embedding": not encoder.scale_embedding,
        f"{part}encoder_attention_heads": encoder.encoder_attention_heads > 0
        and encoder.d_model % encoder.encoder_attention_heads == 0,
        f"{part}max_source_positions": encoder.max_source_positions > POOLED,
    }
    if processor is not None:
        samples = encoder.max_source_positions * _FRAMES_PER_POSITION * HOP
        right |= {
            "feature_size": processor.feature_size == encoder.num_mel_bins,
            "sampling_rate": processor.sampling_rate == RATE,
            "hop_length": processor.hop_length == HOP,
            "n_fft": processor.n_fft == FRAME,
            "chunk_length": processor.chunk_length * RATE == samples,
            "dither": not processor.dither,
            "do_normalize": not processor.do_normalize,
        }
    for field, is_right in right.items():
        if not is_right:
            raise InvalidCheckpoint(f"{folder}: this value of {field} is not supported")
