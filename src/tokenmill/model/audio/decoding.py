"""Decode files of sound in a sandbox, where a malicious file can do no harm.

    python -m tokenmill.model.audio.decoding LIMITS

The format is told by the content, whatever a file is called. What its header says is checked before anything is
decoded, and counted again while it is: lengths lie. The result is mono, 16,000 samples a second.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import msgspec
import numpy as np

from tokenmill.core.errors import InvalidRequest
from tokenmill.ipc.sandbox import Limits, Outcome, Sandbox
from tokenmill.ipc.sandbox_process import run_jobs
from tokenmill.model.audio.resample import Samples, resample
from tokenmill.model.audio.spec import RATE

FORMATS = ("WAV", "FLAC", "MP3", "OGG")
# Samples a second, channels, and bytes of the samples of one channel as floats.
LOWEST_RATE, HIGHEST_RATE, MOST_CHANNELS, MOST_DECODED = 8_000, 192_000, 8, 256 << 20
# Ten minutes at an odd rate take a few seconds; their samples as float64, filtered, a few times their size.
LIMITS = Limits(cpu_seconds=20.0, num_bytes=2 << 30)
_MODULE = "tokenmill.model.audio.decoding"
_BROKEN = "the sound cannot be decoded: it is broken, or none of " + ", ".join(FORMATS)
# Frames that are decoded at once, and the loudest sample, far above all formats of integers.
_BLOCK, _LOUDEST = 1 << 16, 1e6


class SoundDecoder:
    """Decodes files of sound, for any number of threads."""

    def __init__(self) -> None:
        self.sandbox = Sandbox(_MODULE, [], LIMITS)

    def decode(self, data: bytes, most_seconds: float, param: str = "messages") -> Samples:
        """Return the samples of a file.

        Raises:
            InvalidRequest: it is no sound of a supported format, too long, or broken; names `param`.
            Unavailable: it could not be decoded for reasons that are not its own.
        """
        outcome, reply = self.sandbox.ask(msgspec.json.encode(most_seconds) + b"\n" + data)
        if outcome is not Outcome.DONE:
            raise InvalidRequest(reply.decode() if outcome is Outcome.REFUSED else _BROKEN, param)
        return np.frombuffer(reply, dtype=np.float32)

    def close(self) -> None:
        """End the processes."""
        self.sandbox.close()


def decode_sound(data: bytes, most_seconds: float) -> Samples:
    """Decode as `SoundDecoder.decode`, in this process; its errors are soundfile's.

    Raises:
        InvalidRequest: it is too long, silent of samples, or of impossible numbers.
        Exception: whatever soundfile raises for a file that is broken.
    """
    import soundfile

    if not _is_known(data):
        raise InvalidRequest(_BROKEN)
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        rate, channels = file.samplerate, file.channels
        if not LOWEST_RATE <= rate <= HIGHEST_RATE:
            raise InvalidRequest(f"sound of {rate:,} samples a second: {LOWEST_RATE:,} to {HIGHEST_RATE:,} are taken")
        if channels > MOST_CHANNELS:
            raise InvalidRequest(f"sound of {channels} channels: at most {MOST_CHANNELS} are taken")
        most = min(int(most_seconds * rate), MOST_DECODED // 4)
        _check_length(file.frames, most, rate)
        samples = _mono(file, most)
    if not len(samples):
        raise InvalidRequest("the file of sound has no samples")
    return resample(samples, rate, RATE)


def _is_known(data: bytes) -> bool:
    """Return True if a file begins as one of `FORMATS` does."""
    is_wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE"
    is_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0
    return is_wav or is_frame or data.startswith((b"fLaC", b"OggS", b"ID3"))


def _check_length(num_frames: int, most: int, rate: int) -> None:
    if num_frames > most:
        raise InvalidRequest(f"sound of more than {most / rate:g} s, which is the most that is taken here")


def _mono(file: Any, most: int) -> Samples:
    """Return the mean of all channels, block by block."""
    blocks, count = [np.zeros(0, dtype=np.float32)], 0
    while len(block := file.read(_BLOCK, dtype="float32", always_2d=True)):
        count += len(block)
        _check_length(count, most, file.samplerate)
        if not np.abs(block).max() <= _LOUDEST:
            raise InvalidRequest("the file has samples that are not numbers, or far too loud")
        blocks.append(block.mean(axis=1))
    return np.concatenate(blocks)


def main() -> int:
    """Run as the sandbox's process."""

    def decode(message: bytes) -> bytes:
        most_seconds, _, data = message.partition(b"\n")
        return decode_sound(data, msgspec.json.decode(most_seconds, type=float)).tobytes()

    def load() -> None:
        import soundfile  # noqa: F401  # forks find it loaded

    run_jobs(decode, load, msgspec.json.decode(sys.argv[1], type=Limits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
