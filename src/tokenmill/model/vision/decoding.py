"""Decode images in a sandbox, where a malicious file can do no harm.

    python -m tokenmill.model.vision.decoding LIMITS

A file's header is checked before anything is decoded: format (by its content, whatever it is called) and pixels. What
decoders say of broken files stays in the sandbox, since it may name addresses of memory.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.ipc.sandbox import Limits, Outcome, Sandbox
from tokenmill.ipc.sandbox_process import run_jobs
from tokenmill.model.vision.resize import SizeRule

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_PIXELS = 64_000_000
# Decoded, turned upright, converted and resized, an image takes a few times the memory of the largest.
LIMITS = Limits(cpu_seconds=5.0, num_bytes=2 << 30)
_MODULE = "tokenmill.model.vision.decoding"
_BROKEN = "the image cannot be decoded: it is broken, or none of " + ", ".join(FORMATS)


class ImageHead(msgspec.Struct):
    """The size of an image after resizing."""

    height: int
    width: int


class ImageDecoder:
    """Decodes images, for any number of threads."""

    def __init__(self) -> None:
        self.sandbox = Sandbox(_MODULE, [], LIMITS)

    def decode(self, data: bytes, rule: SizeRule) -> tuple[ImageHead, bytes]:
        """Return the size of an image and its pixels, [height, width, 3] uint8, resized by a rule.

        Raises:
            InvalidRequest: it is no image of a supported format, too large, or broken.
            Unavailable: it could not be decoded for reasons that are not its own.
        """
        outcome, reply = self.sandbox.ask(msgspec.json.encode(rule) + b"\n" + data)
        if outcome is not Outcome.DONE:
            raise InvalidRequest(reply.decode() if outcome is Outcome.REFUSED else _BROKEN, "messages")
        line, _, pixels = reply.partition(b"\n")
        return msgspec.json.decode(line, type=ImageHead), pixels

    def close(self) -> None:
        """End the processes."""
        self.sandbox.close()


def decode_image(data: bytes, rule: SizeRule) -> tuple[ImageHead, bytes]:
    """Decode as `ImageDecoder.decode`, in this process; its errors are Pillow's.

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
    return ImageHead(rows, columns), image.resize((columns, rows), Image.Resampling[rule.filter]).tobytes()


def main() -> int:
    """Run as the sandbox's process."""
    from PIL import Image

    def decode(message: bytes) -> bytes:
        rule, _, data = message.partition(b"\n")
        head, pixels = decode_image(data, msgspec.json.decode(rule, type=SizeRule))
        return msgspec.json.encode(head) + b"\n" + pixels

    run_jobs(decode, Image.preinit, msgspec.json.decode(sys.argv[1], type=Limits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
