"""Measure what a token behind a clip of 30 seconds costs a random Whisper, in TokenMill and in transformers.

    OMP_NUM_THREADS=1 python benchmarks/whisper.py [--size base] [--requests 1 8] [--tokens 20] [--dtype float32 ...]

Prints milliseconds of processor time for a token of one request, of one core: they do not depend on what else the
machine does, as times on the wall would. Clips are encoded before; transformers has them all in one batch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from tokenmill import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.whisper_checkpoints import make_whisper_checkpoint

RATE, SECONDS = 16_000, 30
# Width and layers of the published models.
SIZES = {"tiny": (384, 4), "base": (512, 6), "small": (768, 12)}
ASKED = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


def make_checkpoint(folder: Path, size: str) -> Path:
    """Write a random checkpoint of a published shape, with the tokenizer of the tests."""
    width, layers = SIZES[size]
    shape = {
        "vocab_size": 51865,
        "num_mel_bins": 80,
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": width // 64,
        "decoder_attention_heads": width // 64,
        "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width,
        "max_source_positions": 1500,
        "max_target_positions": 448,
    }
    return make_whisper_checkpoint(folder, shape=shape, seconds=SECONDS)


def of_transformers(folder: Path, clips: list[np.ndarray], num_tokens: int, dtype: str) -> float:
    """Return seconds of processor time for `num_tokens` tokens of each clip."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    features = transformers.WhisperFeatureExtractor(feature_size=80)(clips, sampling_rate=RATE, return_tensors="pt")
    start, past, token_ids = 0.0, None, torch.tensor([[331, 332, 336, 338]] * len(clips))
    with torch.inference_mode():
        encoded = model.model.encoder(features["input_features"].to(model.dtype))
        for step in range(num_tokens + 1):
            start = time.process_time() if step == 1 else start
            found = model(encoder_outputs=encoded, decoder_input_ids=token_ids, past_key_values=past, use_cache=True)
            past, token_ids = found.past_key_values, found.logits[:, -1].argmax(-1, keepdim=True)
    return time.process_time() - start


def of_tokenmill(folder: Path, clips: list[np.ndarray], num_tokens: int, dtype: str) -> float:
    """Return the same here: a call with so many tokens more than one less the call with one, clips being cached."""
    chats = [[{"role": "user", "content": [{"type": "audio", "audio": (clip, RATE)}]}] for clip in clips]
    with LLM(folder, dtype=dtype, kv_cache_memory_bytes=2 << 30, max_num_seqs=len(clips)) as llm:

        def seconds(count: int) -> float:
            params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
            start = time.process_time()
            llm.chat(chats, params, use_tqdm=False, chat_template_kwargs={"decoder_prompt": ASKED})
            return time.process_time() - start

        seconds(1)
        return -seconds(1) + seconds(num_tokens + 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    measures: dict[str, Callable[..., float]] = {"transformers": of_transformers, "TokenMill": of_tokenmill}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder), arguments.size)
        for dtype in arguments.dtype:
            for count in arguments.requests:
                clips = [rng.standard_normal(SECONDS * RATE).astype(np.float32) * 0.1 for _ in range(count)]
                for name, measure in measures.items():
                    spent = measure(checkpoint, clips, arguments.tokens, dtype)
                    print(f"{name} {dtype} {count}: {1000 * spent / arguments.tokens / count:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
