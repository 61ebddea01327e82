"""Decode images where they can do no harm: in a process of its own, each in a fork with little time and memory.

    text worker --(length, rule, bytes of a file)--> this process --fork--> child: header, checks, pixels, resize
    text worker <--(length, head as JSON, pixels)-- this process <----

A file's header is checked before anything is decoded: format (by its content, whatever it is called) and pixels. What
decoders say of broken files stays here, since it may name addresses of memory.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from typing import Any, BinaryIO

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.vision.resize import SizeRule

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS = 64_000_000
CPU_SECONDS = 5.0
# Decoded, turned upright, converted and resized: a few times what the largest image takes.
MEMORY_BYTES = 2 << 30
_LENGTH = struct.Struct(">I")
# When the process is stuck for reasons of the machine.
_PATIENCE_SECONDS = 60.0
_BROKEN = "the image cannot be decoded: it is broken, or none of " + ", ".join(FORMATS)


class ImageHead(msgspec.Struct):
    """What became of an image: its size after it was resized, or why there is none."""

    height: int = 0
    width: int = 0
    error: str = ""


class ImageDecoder:
    """The text worker's end. The process starts with the first image; threads take turns."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def decode(self, data: bytes, rule: SizeRule) -> tuple[ImageHead, bytes]:
        """The size of an image and its pixels, [height, width, 3] uint8, resized by a rule.

        Raises:
            InvalidRequest: it is no image of a supported format, too large, or broken.
        """
        with self._lock:
            try:
                reply = self._ask(msgspec.json.encode(rule) + b"\n" + data)
            except (OSError, ValueError, struct.error):
                self._close()
                raise InvalidRequest(_BROKEN, "messages") from None
        line, _, pixels = reply.partition(b"\n")
        head = msgspec.json.decode(line, type=ImageHead)
        if head.error:
            raise InvalidRequest(head.error, "messages")
        return head, pixels

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError), process:
                pass  # closes the pipes, of which one may be broken, and waits

    def _ask(self, message: bytes) -> bytes:
        if self._process is None:
            command = [sys.executable, "-m", "tokenmill.vision.decoding"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "both were asked for"
        stdin.write(_LENGTH.pack(len(message)) + message)
        stdin.flush()
        if not select.select([stdout], [], [], _PATIENCE_SECONDS)[0]:
            raise TimeoutError("no answer")
        (length,) = _LENGTH.unpack(stdout.read(_LENGTH.size))
        return stdout.read(length)


def main() -> int:
    """Entry point of the process: decode images until standard input ends."""
    from PIL import Image

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    Image.preinit()  # the forks have what they need
    while (message := _read(sys.stdin.buffer)) is not None:
        rule, _, data = message.partition(b"\n")
        reply = _in_fork(data, msgspec.json.decode(rule, type=SizeRule))
        sys.stdout.buffer.write(_LENGTH.pack(len(reply)) + reply)
        sys.stdout.buffer.flush()
    return 0


def decode_image(data: bytes, rule: SizeRule) -> tuple[ImageHead, bytes]:
    """What the fork does, see `ImageDecoder.decode`; its errors are Pillow's.

    Raises:
        InvalidRequest: the header says that it is too large, or of impossible proportions.
        Exception: whatever Pillow raises for a file that is broken.
    """
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = None  # checked here, by the header
    with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        width, height = opened.size
        if width * height > MOST_PIXELS:
            raise InvalidRequest(
                f"an image of {width} x {height} pixels: at most {MOST_PIXELS:,} are decoded", "messages"
            )
        rule.size_of(height, width)
        image: Any = ImageOps.exif_transpose(opened).convert("RGB")  # the first frame
    rows, columns = rule.size_of(image.height, image.width)
    return ImageHead(rows, columns), image.resize((columns, rows), Image.Resampling.BICUBIC).tobytes()


def _read(stream: BinaryIO) -> bytes | None:
    header = stream.read(_LENGTH.size)
    return None if len(header) < _LENGTH.size else stream.read(_LENGTH.unpack(header)[0])


def _in_fork(data: bytes, rule: SizeRule) -> bytes:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        _decode_and_exit(data, rule, write_end)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        reply = pipe.read()
    _, status = os.waitpid(child, 0)
    if status or not reply:
        return msgspec.json.encode(ImageHead(error=_BROKEN))
    return reply


def _decode_and_exit(data: bytes, rule: SizeRule, write_end: int) -> None:
    """The child's whole life. Ends without Python's own clean-up, which belongs to the parent."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the limit is not kept, and time and the header alone bound an image
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    with contextlib.suppress(BaseException):
        try:
            head, pixels = decode_image(data, rule)
        except InvalidRequest as error:
            head, pixels = ImageHead(error=str(error)), b""
        with open(write_end, "wb") as pipe:
            pipe.write(msgspec.json.encode(head) + b"\n" + pixels)
        os._exit(0)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
