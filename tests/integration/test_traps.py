"""The product, called in a folder full of modules that nobody has installed: none of them runs, whatever is asked."""

from __future__ import annotations

import base64
import importlib.util
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.serving import MODEL_NAME, serve
from tests.ipc.traps import caught, lay_traps
from tests.model.adapters.trained import make_adapter
from tests.serving.server.running_server import RunningServer
from tests.vision_checkpoints import make_vision_checkpoint

# As it is installed: `python -m` looks into the current folder before any code of ours can say no.
PROGRAM = [str(Path(sys.executable).with_name("tokenmill"))]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHAT = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
STRUCTURED = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "traps"


@pytest.fixture
def marker(folder: Path) -> Path:
    return lay_traps(folder)


def chat(server: RunningServer, **fields: object) -> None:
    answer = server.post("/v1/chat/completions", CHAT | fields)
    assert answer.status_code == 200, answer.text


def test_of_engines_and_text_workers(model: Path, folder: Path, marker: Path) -> None:
    with serve(model, "--tokenizer-workers", "2", program=PROGRAM, folder=folder) as server:
        for number in range(4):
            chat(server, seed=number)
        chat(server, **STRUCTURED)
    assert caught(marker) == []


def test_of_ranks_of_a_server(model: Path, folder: Path, marker: Path) -> None:
    flags = ("-tp", "2", "--dtype", "bfloat16")
    with serve(model, *flags, program=PROGRAM, folder=folder) as server:
        chat(server)
        chat(server, **STRUCTURED)
    assert caught(marker) == []


@pytest.mark.skipif(importlib.util.find_spec("PIL") is None, reason="Pillow, which decodes images, is not installed")
def test_of_decoders_of_images(tmp_path: Path, folder: Path, marker: Path) -> None:
    from PIL import Image

    buffer = io.BytesIO()
    Image.effect_noise((96, 96), 90).convert("RGB").save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "hello"}]
    with serve(make_vision_checkpoint(tmp_path / "model"), program=PROGRAM, folder=folder) as server:
        chat(server, messages=[{"role": "user", "content": parts}])
    assert caught(marker) == []


def test_of_patterns_of_adapters(model: Path, tmp_path: Path, folder: Path, marker: Path) -> None:
    make_adapter(model, tmp_path / "adapter", 1, target_modules=r".*\.(?:0\.self_attn\.[qv]|1\.self_attn\.o)_proj")
    flags = ("--enable-lora", "--lora-modules", f"mine={tmp_path / 'adapter'}")
    with serve(model, *flags, program=PROGRAM, folder=folder) as server:
        chat(server, model="mine")
    assert caught(marker) == []


def test_of_ranks_offline(model: Path, folder: Path, marker: Path) -> None:
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "hello"}) + "\n")
    flags = ["-i", "prompts.jsonl", "-o", "answers.jsonl", "--model", str(model), "-tp", "2", "--max-tokens", "4"]
    done = subprocess.run(
        [*PROGRAM, "generate", *flags], cwd=folder, env=dict(os.environ), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len((folder / "answers.jsonl").read_text().splitlines()) == 1
    assert caught(marker) == []
