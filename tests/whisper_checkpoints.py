"""Small random checkpoints of Whisper, and transformers' answers on them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from tests.checkpoints import VOCAB_SIZE, make_tokenizer, randomize
from tests.vision_checkpoints import add_marks

LANGUAGES = ("en", "de", "zh")
MARKS = (
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|notimestamps|>",
)
TIMES = tuple(f"<|{hundredths / 100:.2f}|>" for hundredths in range(0, 202, 2))
# Clips of two seconds: 100 positions, which are no multiple of a page.
SECONDS, BINS, RATE, POSITIONS, TEXT = 2, 20, 16_000, 100, 60
SUPPRESSED, SUPPRESSED_FIRST = (5, 17, 301), (40, 41)
Samples = npt.NDArray[np.float32]


_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + len(MARKS) + len(TIMES),
    "num_mel_bins": BINS,
    "d_model": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 50,
    "decoder_layers": 3,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 40,
    "max_source_positions": POSITIONS,
    "max_target_positions": TEXT,
}


def make_whisper_checkpoint(
    folder: Path,
    seed: int = 0,
    is_multilingual: bool = True,
    shape: Mapping[str, Any] = MappingProxyType(_SHAPE),
    seconds: int = SECONDS,
) -> Path:
    """Write a checkpoint of three decoder layers and two of the encoder, or of another shape, with all its files.

    Args:
        shape: fields of the config. seconds: of a clip, of 50 positions each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = make_tokenizer(folder, VOCAB_SIZE)
    ids = add_marks(folder, (*MARKS, *TIMES), "")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    _write(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    end = special["<|endoftext|>"]
    config = transformers.WhisperConfig(
        **shape,
        eos_token_id=end,
        pad_token_id=end,
        bos_token_id=end,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    randomize(model, seed)
    with torch.no_grad():
        # Else the head, which is the embedding, finds the last token again.
        model.model.decoder.embed_tokens.weight.mul_(0.3)
    model.save_pretrained(folder)
    generation = {
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "suppress_tokens": SUPPRESSED,
        "begin_suppress_tokens": [*SUPPRESSED_FIRST, end],
        "is_multilingual": is_multilingual,
        "lang_to_id": {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "max_initial_timestamp_index": 20,
    }
    _write(folder / "generation_config.json", generation)
    bins = shape["num_mel_bins"]
    features = {"feature_size": bins, "chunk_length": seconds, "sampling_rate": RATE, "hop_length": 160, "n_fft": 400}
    _write(folder / "preprocessor_config.json", features)
    return folder


def load_whisper_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """The checkpoint as a transformers model: eager attention, eval mode."""
    return transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def features_of(clip: Samples) -> torch.Tensor:
    """The features that transformers makes of a clip at 16 kHz, [1, bins, frames]."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=BINS, chunk_length=SECONDS)
    return extractor(clip, sampling_rate=RATE, return_tensors="pt")["input_features"]


@torch.no_grad()
def logits_of(oracle: transformers.PreTrainedModel, clip: Samples, text: Sequence[int]) -> torch.Tensor:
    """The oracle's logits behind each token of a text, [n, vocabulary]."""
    return oracle(input_features=features_of(clip), decoder_input_ids=torch.tensor([list(text)])).logits[0]


def answer_of(
    oracle: transformers.PreTrainedModel,
    clip: Samples,
    prompt: Sequence[int],
    num_tokens: int,
    suppressed: Sequence[int] = (),
    suppressed_first: Sequence[int] = (),
    end: int | None = None,
    has_times: bool = False,
) -> list[int]:
    """The oracle's greedy tokens behind the text of a prompt, `end` among them, step by step as its forward gives.

    With `has_times` by its rules on marks of time.
    """
    rules = WhisperTimeStampLogitsProcessor(oracle.generation_config, begin_index=len(prompt)) if has_times else None
    found: list[int] = []
    while len(found) < num_tokens and (not found or found[-1] != end):
        logits = logits_of(oracle, clip, [*prompt, *found])[-1]
        logits[list(suppressed)] = -torch.inf
        if not found:
            logits[list(suppressed_first)] = -torch.inf
        if rules is not None:
            logits = rules(torch.tensor([[*prompt, *found]]), logits[None])[0]
        found.append(int(logits.argmax()))
    return found


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
