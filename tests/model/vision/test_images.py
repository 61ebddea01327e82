"""Sizes and pixels as transformers has them; files that mean harm end in an error, and the process goes on."""

from __future__ import annotations

import base64
import io
import os
import signal
import struct
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as their_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as their_frame_resize

from tests.vision_checkpoints import MAX_PIXELS, MIN_PIXELS
from tokenmill.config.configs import EngineConfig
from tokenmill.core.data_url import MOST_BYTES, data_of
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.media import content_digest, surrogate_ids
from tokenmill.ipc.sandbox import Outcome, Reply
from tokenmill.model.vision.decoding import ImageDecoder
from tokenmill.model.vision.resize import SizeRule, smart_resize

RULE = SizeRule(32, MIN_PIXELS, MAX_PIXELS)


@pytest.fixture(scope="module")
def decoder() -> Iterator[ImageDecoder]:
    decoder = ImageDecoder()
    yield decoder
    decoder.close()


def file_of(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_sizes_are_those_of_transformers(rng: np.random.Generator) -> None:
    for height, width in np.exp(rng.uniform(0, 9, (10000, 2))).astype(int).tolist():
        if max(height, width) > 200 * min(height, width):
            with pytest.raises(InvalidRequest, match="200 times"):
                smart_resize(height, width, 32, 65536, 16777216)
        else:
            assert smart_resize(height, width, 32, 65536, 16777216) == their_resize(height, width, 32, 65536, 16777216)


def test_sizes_of_frames_are_those_of_transformers(rng: np.random.Generator) -> None:
    for height, width in np.exp(rng.uniform(0, 8, (3000, 2))).astype(int).tolist():
        num_frames, most = int(rng.integers(2, 100)), int(rng.choice([25165824, 786432, 60000]))
        rule = SizeRule(32, 4096, most, num_frames)
        try:
            expected = their_frame_resize(num_frames, height, width, 2, 32, 4096, most)
        except ValueError:
            with pytest.raises(InvalidRequest, match="200 times"):
                rule.size_of(height, width)
        else:
            assert rule.size_of(height, width) == expected


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P"])
def test_pixels_are_those_of_transformers(decoder: ImageDecoder, rng: np.random.Generator, mode: str) -> None:
    image = Image.fromarray(rng.integers(0, 256, (75, 131, 3), dtype=np.uint8)).convert(mode)
    head, pixels = decoder.decode(file_of(image), RULE)
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    processor = Qwen2VLImageProcessorPil(patch_size=16, size=size, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    patches = processor(images=[image], return_tensors="np").pixel_values
    rows, columns = head.height // 32, head.width // 32
    groups = patches.reshape(rows, columns, 2, 2, 3, 2, 16, 16)[:, :, :, :, :, 0]
    theirs = groups.transpose(0, 2, 5, 1, 3, 6, 4).reshape(head.height, head.width, 3)
    ours = np.frombuffer(pixels, np.uint8).reshape(theirs.shape) / 255
    assert np.abs(ours - theirs).max() <= 1 / 255 + 1e-6


def test_formats_are_told_by_their_content(decoder: ImageDecoder, rng: np.random.Generator) -> None:
    image = Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    for kind in ("PNG", "JPEG", "WEBP", "GIF"):
        head, pixels = decoder.decode(file_of(image, kind), RULE)
        assert len(pixels) == head.height * head.width * 3


def _png(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is so large."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )


def _whole() -> bytes:
    return file_of(Image.effect_noise((300, 300), 90))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (_png(30000, 30000), "at most 64,000,000 are decoded"),
        (_png(1, 60000), "200 times"),
        (_png(500, 500), "cannot be decoded"),
        (_whole()[:2000], "cannot be decoded"),
        (b"", "cannot be decoded"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be decoded"),
        (file_of(Image.new("RGB", (64, 64)), "BMP"), "cannot be decoded"),
        (file_of(Image.new("RGB", (64, 64)), "TIFF"), "cannot be decoded"),
        (b"%PDF-1.4" + _whole(), "cannot be decoded"),
    ],
    ids=["bomb", "line", "short data", "truncated", "empty", "svg", "bmp", "tiff", "polyglot"],
)
def test_files_that_mean_harm_are_refused(decoder: ImageDecoder, data: bytes, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as refusal:
        decoder.decode(data, RULE)
    assert "0x" not in str(refusal.value)
    decoder.decode(_whole(), RULE)  # it goes on


def test_only_the_first_frame_of_an_animation_is_decoded(decoder: ImageDecoder) -> None:
    frames = [Image.new("RGB", (64, 64), (0, 0, number % 256)) for number in range(300)]
    red = Image.new("RGB", (64, 64), (255, 0, 0))
    head, pixels = decoder.decode(file_of(red, "GIF", save_all=True, append_images=frames), RULE)
    assert set(np.frombuffer(pixels, np.uint8).reshape(-1, 3)[:, 0].tolist()) == {255}
    assert (head.height, head.width) == (64, 64)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("data", [_whole(), file_of(Image.effect_noise((1500, 1500), 90))], ids=["small", "large"])
def test_no_image_is_blamed_for_a_process_that_is_gone(decoder: ImageDecoder, number: int, data: bytes) -> None:
    expected = decoder.decode(data, RULE)
    for pid in decoder.sandbox.pids:
        os.kill(pid, number)
    assert decoder.decode(data, RULE) == expected


def test_a_file_that_crashes_a_decoder_is_refused(decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    for outcome in (Outcome.CRASHED, Outcome.TOO_SLOW):
        with monkeypatch.context() as patch:
            patch.setattr(decoder.sandbox, "ask", lambda data, outcome=outcome: Reply(outcome, b""))
            with pytest.raises(InvalidRequest, match="cannot be decoded"):
                decoder.decode(_whole(), RULE)


def test_data_urls_are_read_and_others_are_not() -> None:
    data = base64.b64encode(b"bytes").decode()
    for head in ("data:image/png;base64,", "data:image/jpeg;name=a.jpg;base64,", "data:;base64,"):
        assert data_of(head + data) == b"bytes"
    for url in ("data:image/png," + data, "http://a/b", "DATA", "data:image/png;base64,%%%", ""):
        with pytest.raises(InvalidRequest):
            data_of(url)
    with pytest.raises(InvalidRequest, match="more than 32 MiB"):
        data_of("data:image/png;base64," + "A" * (MOST_BYTES * 4 // 3 + 100))


def test_surrogates_tell_contents_apart() -> None:
    first, second = (content_digest(b"pixels", *shape, "p") for shape in ((2, 1), (1, 2)))
    assert first != second
    ids = surrogate_ids(first, 500)
    assert ids.min() >= 1 << 30
    assert (ids[:16] == surrogate_ids(first, 16)).all()
    assert not set(ids.tolist()) & set(surrogate_ids(second, 500).tolist())


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (None, (8, 1)),
        ('{"image": 4}', (4, 1)),
        ('{"image": 0, "video": 0}', (0, 0)),
        ("image=3,video=2,audio=0", (3, 2)),
        ("{}", (8, 1)),
    ],
)
def test_limits_are_read_in_the_forms_of_vllm(given: str | None, limit: tuple[int, int]) -> None:
    limits = EngineConfig(limit_mm_per_prompt=given).media_limits()
    assert (limits.image, limits.video) == limit


@pytest.mark.parametrize(
    "given", ["4", "image=", "image=x", '{"image": -1}', '{"image": "4"}', "audio=-1", '{"video": -1}', '{"sound": 1}']
)
def test_other_limits_are_refused_by_name(given: str) -> None:
    with pytest.raises(InvalidConfig, match="--limit-mm-per-prompt"):
        EngineConfig(limit_mm_per_prompt=given).resolve()
