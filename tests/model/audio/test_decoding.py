"""Files of sound are decoded in a sandbox, by content, within limits; what is long is cut where it is quiet."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator

import numpy as np
import pytest
import soundfile

from tests.audio_checkpoints import RATE, noise
from tokenmill.core.errors import InvalidRequest
from tokenmill.model.audio.decoding import SoundDecoder
from tokenmill.model.audio.pieces import pieces, wav_file
from tokenmill.model.audio.resample import resample

MOST = 10.0


@pytest.fixture(scope="module")
def decoder() -> Iterator[SoundDecoder]:
    decoder = SoundDecoder()
    yield decoder
    decoder.close()


def file_of(samples: np.ndarray, rate: int, form: str, subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=form, subtype=subtype)
    return buffer.getvalue()


@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_files_without_loss_give_their_samples_resampled(
    decoder: SoundDecoder, rng: np.random.Generator, rate: int
) -> None:
    stereo = np.stack([noise(rng, 0.5, rate), noise(rng, 0.5, rate)], 1)
    for form, subtype in (("WAV", "FLOAT"), ("WAV", "PCM_16"), ("WAV", "PCM_24"), ("FLAC", "PCM_24")):
        found = decoder.decode(file_of(stereo, rate, form, subtype), MOST)
        expected = resample(stereo.mean(axis=1), rate, RATE)
        assert len(found) == len(expected)
        assert np.abs(found - expected).max() < (1e-4 if subtype == "PCM_16" else 2e-6)


@pytest.mark.parametrize("form", ["MP3", "OGG"])
def test_files_with_loss_sound_alike(decoder: SoundDecoder, form: str) -> None:
    tone = (0.3 * np.sin(np.arange(RATE) * 2 * np.pi * 440 / RATE)).astype(np.float32)
    found = decoder.decode(file_of(tone, RATE, form), MOST)
    spectrum = np.abs(np.fft.rfft(found[4000:12000]))
    assert abs(spectrum.argmax() * RATE / 8000 - 440) < 3


def test_our_own_files_lose_nothing(decoder: SoundDecoder, rng: np.random.Generator) -> None:
    samples = noise(rng, 0.7)
    assert np.array_equal(decoder.decode(wav_file(samples), MOST), samples)


def with_length(data: bytes, claimed: int) -> bytes:
    """A WAV file whose header claims another length."""
    at = data.index(b"data") + 4
    return data[:at] + struct.pack("<I", claimed) + data[at + 4 :]


def bad_files() -> dict[str, tuple[bytes, str]]:
    silence = np.zeros(RATE, np.float32)
    broken = np.full(1000, np.nan, np.float32)
    return {
        "empty": (b"", "cannot be decoded"),
        "text": (b"hello" * 100, "cannot be decoded"),
        "aiff": (file_of(silence, RATE, "AIFF"), "cannot be decoded"),
        "cut": (file_of(silence, RATE, "FLAC")[:30], "cannot be decoded"),
        "head": (b"RIFF\0\0\0\0WAVE", "cannot be decoded"),
        "no samples": (file_of(silence[:0], RATE, "WAV"), "no samples"),
        "nan": (wav_file(broken), "not numbers"),
        "inf": (wav_file(np.full(9, np.inf, np.float32)), "not numbers"),
        "slow": (wav_file(silence, 7999), "7,999 samples a second"),
        "fast": (wav_file(silence, 192001), "192,001 samples a second"),
        "channels": (file_of(np.zeros((100, 9), np.float32), RATE, "WAV"), "9 channels"),
        "long": (file_of(np.zeros(11 * 8000, np.float32), 8000, "FLAC"), "more than 10 s"),
        "bomb": (file_of(np.zeros(60 * 16000, np.float32), RATE, "OGG"), "more than 10 s"),
    }


@pytest.mark.parametrize("name", list(bad_files()))
def test_bad_files_are_refused_in_a_sentence(decoder: SoundDecoder, name: str) -> None:
    data, sentence = bad_files()[name]
    with pytest.raises(InvalidRequest, match=sentence):
        decoder.decode(data, MOST)
    decoder.decode(wav_file(np.zeros(100, np.float32)), MOST)  # it goes on


def test_a_length_that_lies_is_counted(decoder: SoundDecoder) -> None:
    data = wav_file(np.zeros(RATE, np.float32))
    assert len(decoder.decode(with_length(data, 0xFFFFFFFF), MOST)) == RATE


def test_long_sound_is_cut_where_it_is_quiet_and_nothing_is_lost(rng: np.random.Generator) -> None:
    samples = noise(rng, 95.0) + 0.05
    for pause in (29.4, 58.7, 87.9):
        samples[int((pause - 0.1) * RATE) : int((pause + 0.1) * RATE)] = 0
    cut = list(pieces(samples, 30 * RATE))
    assert np.array_equal(np.concatenate(cut), samples)
    ends = np.cumsum([len(one) for one in cut])[:-1] / RATE
    assert ends == pytest.approx([29.4, 58.7, 87.9], abs=0.11)
    assert max(map(len, cut)) <= 30 * RATE
    assert [len(one) for one in pieces(samples[:500], 30 * RATE)] == [500]
