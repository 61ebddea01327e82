"""Small random checkpoints of Qwen2-Audio, and transformers' answers on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tests.checkpoints import VOCAB_SIZE, make_tokenizer, randomize
from tests.vision_checkpoints import add_marks

MARKS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
# Clips of two seconds at most: 100 positions, 200 frames.
SECONDS, BINS, RATE = 2, 20, 16_000
TEMPLATE = (
    "{% set count = namespace(value=0) %}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if 'audio' in part or 'audio_url' in part or part['type'] == 'audio' %}{% set count.value = count.value + 1 %}"
    "{{ 'Audio ' ~ count.value ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Samples = npt.NDArray[np.float32]


def make_audio_checkpoint(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint of three text layers and an encoder of three, with tokenizer, template and processor."""
    folder.mkdir(parents=True, exist_ok=True)
    special = make_tokenizer(folder, VOCAB_SIZE)
    ids = add_marks(folder, MARKS, TEMPLATE)
    text = {
        "model_type": "qwen2",
        "vocab_size": VOCAB_SIZE + len(MARKS),
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["<|endoftext|>"],
        "bos_token_id": None,
    }
    audio = {
        "model_type": "qwen2_audio_encoder",
        "d_model": 36,
        "encoder_layers": 3,
        "encoder_attention_heads": 3,
        "encoder_ffn_dim": 50,
        "num_mel_bins": BINS,
        "max_source_positions": SECONDS * RATE // 320,
    }
    config = transformers.Qwen2AudioConfig(
        text_config=text, audio_config=audio, audio_token_index=ids["<|AUDIO|>"], tie_word_embeddings=False
    )
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    randomize(model, seed)
    model.to(dtype).save_pretrained(folder)
    _write(folder / "generation_config.json", {"eos_token_id": [special["<|im_end|>"]]})
    features = {"feature_size": BINS, "chunk_length": SECONDS, "sampling_rate": RATE, "hop_length": 160, "n_fft": 400}
    _write(folder / "preprocessor_config.json", features)
    return folder


def load_audio_oracle(folder: Path) -> transformers.PreTrainedModel:
    """The checkpoint as a transformers model: float32, eager attention, eval mode."""
    return transformers.Qwen2AudioForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def features_of(clips: list[Samples]) -> dict[str, torch.Tensor]:
    """Features that transformers' processor makes of clips at 16 kHz."""
    if not clips:
        return {}
    extractor = transformers.WhisperFeatureExtractor(feature_size=BINS, chunk_length=SECONDS)
    found = extractor(clips, sampling_rate=RATE, return_attention_mask=True, return_tensors="pt")
    return {"input_features": found["input_features"], "feature_attention_mask": found["attention_mask"]}


def answer_of(
    oracle: transformers.PreTrainedModel, prompt: list[int], clips: list[Samples], num_tokens: int
) -> list[int]:
    """The oracle's greedy tokens."""
    ids = torch.tensor([prompt])
    answer = oracle.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        **features_of(clips),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    found: list[int] = answer[0, len(prompt) :].tolist()
    return found


def noise(rng: np.random.Generator, seconds: float, rate: int = RATE) -> Samples:
    """Noise that rises and falls, so that its spectrogram is not flat."""
    count = int(seconds * rate)
    return (rng.standard_normal(count) * np.sin(np.linspace(0, 20, count)) * 0.1).astype(np.float32)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
