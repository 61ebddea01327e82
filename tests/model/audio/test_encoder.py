"""Spectrograms, resampling, lengths and the encoder beside their oracles: transformers and scipy."""

from __future__ import annotations

import json
from math import gcd
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from scipy.signal import resample_poly
from transformers.audio_utils import mel_filter_bank

from tests.audio_checkpoints import BINS, RATE, SECONDS, features_of, noise
from tokenmill.core.errors import InvalidCheckpoint, InvalidRequest
from tokenmill.model.audio.encoder import load_encoder
from tokenmill.model.audio.features import log_mel, mel_bins
from tokenmill.model.audio.resample import resample
from tokenmill.model.audio.spec import num_tokens, read_audio
from tokenmill.model.kernels.torch_kernels import TorchKernels


@pytest.mark.parametrize("bins", [20, 80, 128])
def test_bins_are_those_of_transformers(bins: int) -> None:
    theirs = mel_filter_bank(201, bins, 0.0, 8000.0, RATE, norm="slaney", mel_scale="slaney")
    assert np.allclose(mel_bins(bins), theirs, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("bins", "seconds"), [(80, 0.3), (128, 2.0), (128, 30.0)])
def test_spectrograms_are_those_of_transformers(bins: int, seconds: float, rng: np.random.Generator) -> None:
    clip = noise(rng, seconds)
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins)
    theirs = extractor(clip, sampling_rate=RATE, return_tensors="pt")["input_features"][0]
    padded = torch.nn.functional.pad(torch.from_numpy(clip), (0, 30 * RATE - len(clip)))
    assert torch.equal(log_mel(padded, torch.from_numpy(mel_bins(bins)).float()), theirs)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 32000, 44100, 48000, 192000, 15999])
def test_samples_of_other_rates_are_those_of_scipy(rate: int, rng: np.random.Generator) -> None:
    for count in (1, 2, 77, rate // 3):
        samples = rng.standard_normal(count).astype(np.float32)
        common = gcd(rate, RATE)
        theirs = resample_poly(samples.astype(np.float64), RATE // common, rate // common)
        found = resample(samples, rate, RATE)
        assert len(found) == len(theirs)
        assert np.abs(found - theirs).max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("samples", [321, 640, 641, 960, 16000, 16001, 31999, 32000])
def test_embeddings_are_those_of_transformers(
    checkpoint: Path, oracle: transformers.PreTrainedModel, rng: np.random.Generator, samples: int
) -> None:
    spec = read_audio(checkpoint)
    assert spec is not None
    assert spec.max_seconds == SECONDS
    encoder = load_encoder(checkpoint, spec, TorchKernels("float32", "cpu"))
    clip = noise(rng, samples / RATE)
    inputs = features_of([clip])
    positions, length = oracle.model.audio_tower._get_feat_extract_output_lengths(
        inputs["feature_attention_mask"].sum()
    )
    mask = torch.zeros(1, 1, spec.max_positions, spec.max_positions)
    mask[..., int(positions) :] = torch.finfo(torch.float32).min
    hidden = oracle.model.audio_tower(inputs["input_features"], attention_mask=mask).last_hidden_state
    theirs = oracle.model.multi_modal_projector(hidden)[0, : int(length)]
    found = encoder.encode(torch.from_numpy(clip))
    assert num_tokens(len(clip)) == int(length) == len(found)
    assert torch.allclose(found, theirs, atol=1e-5)


def test_a_clip_without_an_embedding_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="too short"):
        num_tokens(320)


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("config.json", ("audio_config", "activation_function"), "relu"),
        ("config.json", ("audio_config", "scale_embedding"), True),
        ("config.json", ("audio_config", "encoder_attention_heads"), 7),
        ("preprocessor_config.json", ("feature_size",), BINS + 1),
        ("preprocessor_config.json", ("sampling_rate",), 8000),
        ("preprocessor_config.json", ("chunk_length",), 30),
        ("preprocessor_config.json", ("dither",), 0.1),
    ],
)
def test_values_that_are_not_supported_are_named(
    checkpoint: Path, tmp_path: Path, file: str, path: tuple[str, ...], value: object
) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    fields = json.loads((tmp_path / file).read_text())
    inner = fields if len(path) == 1 else fields[path[0]]
    inner[path[-1]] = value
    (tmp_path / file).write_text(json.dumps(fields))
    with pytest.raises(InvalidCheckpoint, match=path[-1]):
        read_audio(tmp_path)
