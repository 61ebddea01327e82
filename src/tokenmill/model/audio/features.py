"""Log-mel spectrograms, as transformers' WhisperFeatureExtractor makes them.

samples, padded -> Fourier transforms of 400 each 160 -> power -> Slaney's mel bins -> log10, the loudest 8 kept

Computed in float32 whatever the model's dtype, by the operations that transformers takes where torch is installed, so
that the bits are its. Where a model was trained on these numbers, no other transform will do.

Does not know files and rates: samples are mono, 16,000 a second.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from tokenmill.model.audio.spec import FRAME, HOP, RATE, AudioSpec

# Below this many hertz the mel scale is linear; above, it rises by the logarithm.
_KNEE, _HERTZ_PER_MEL, _LOG_STEP = 1000.0, 200.0 / 3, np.log(6.4) / 27


def clip_features(samples: torch.Tensor, spec: AudioSpec, bins: torch.Tensor) -> torch.Tensor:
    """Return the frames that the positions of a clip see: [n] float32 -> [num_bins, 2 * positions + 1] at most.

    `bins`: see `log_mel`.

    The loudest of a clip is that of all to which it is padded, and its last position sees two frames of the silence.
    """
    padded = functional.pad(samples, (0, spec.max_samples - len(samples)))
    return log_mel(padded, bins)[:, : 2 * spec.num_positions(len(samples)) + 1]


def log_mel(samples: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    """Return the spectrogram of a padded clip: [n] float32 -> [num_bins, n / 160] float32.

    `bins`: `mel_bins` as float32, where the samples are.
    """
    window = torch.hann_window(FRAME, device=samples.device)
    transformed = torch.stft(samples.unsqueeze(0), FRAME, HOP, window=window, return_complex=True)
    power = (transformed[..., :-1].abs() ** 2).contiguous()
    loudness = (bins.T @ power).clamp(min=1e-10).log10().squeeze(0)
    return (torch.maximum(loudness, loudness.max() - 8.0) + 4.0) / 4.0


@functools.cache
def mel_bins(num_bins: int) -> npt.NDArray[np.float64]:
    """Return the share of each frequency in each bin, [201, num_bins]: triangles of area 1 side by side in mels."""
    frequencies = np.linspace(0, RATE // 2, FRAME // 2 + 1)
    corners = _hertz(np.linspace(0.0, _mels(RATE / 2), num_bins + 2))
    slopes = corners[np.newaxis, :] - frequencies[:, np.newaxis]
    widths = np.diff(corners)
    falling, rising = slopes[:, 2:] / widths[1:], -slopes[:, :-2] / widths[:-1]
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return np.asarray(triangles * (2.0 / (corners[2:] - corners[:-2])), dtype=np.float64)


def _mels(hertz: float) -> float:
    if hertz < _KNEE:
        return hertz / _HERTZ_PER_MEL
    return float(_KNEE / _HERTZ_PER_MEL + np.log(hertz / _KNEE) / _LOG_STEP)


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    knee = _KNEE / _HERTZ_PER_MEL
    return np.where(mels < knee, mels * _HERTZ_PER_MEL, _KNEE * np.exp(_LOG_STEP * (mels - knee)))
