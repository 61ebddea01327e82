"""Images over HTTP, in the forms of three APIs, and the load of `bench serve`; files that mean harm: test_bombs.py."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.serving.server.running_server import RunningServer, start_server
from tokenmill.cli.main import main
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.lab.bench.serve import make_parser, read_load
from tokenmill.serving.replicas.starter import ENGINE_MODULE

NUM_TOKENS = 6


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    engine = EngineConfig(
        model=str(checkpoint), dtype="float32", num_pages=200, max_num_seqs=8, limit_mm_per_prompt='{"image": 2}'
    )
    with start_server(engine, ENGINE_MODULE, served_model_name=("tiny",)) as running:
        yield running


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def image(rng: np.random.Generator) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def chat_body(*urls: str, **more: object) -> dict[str, object]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [*parts, {"type": "text", "text": "hello"}]
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        **more,
    }


def test_three_apis_show_the_model_the_same_image(server: RunningServer, image: bytes) -> None:
    chat = server.post("/v1/chat/completions", chat_body(url_of(image))).json()
    text = chat["choices"][0]["message"]["content"]
    server.wait_for(lambda: server.metric("mm_encoder_tokens_total") >= 9)  # engines tell once a second
    encoded = server.metric("mm_encoder_tokens_total")
    parts = [{"type": "input_image", "image_url": url_of(image)}, {"type": "input_text", "text": "hello"}]
    limits = {"model": "tiny", "temperature": 0}
    body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": NUM_TOKENS, **limits}
    responses = server.post("/v1/responses", body).json()
    assert responses["output"][-1]["content"][0]["text"] == text
    assert responses["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image).decode()}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": "hello"}]
    body = {"messages": [{"role": "user", "content": blocks}], "max_tokens": NUM_TOKENS, **limits}
    assert server.post("/v1/messages", body).json()["content"][0]["text"] == text
    server.wait_until_unused()
    assert server.metric("mm_encoder_tokens_total") == encoded


def test_pictures_in_results_of_tools_are_shown_behind_them(server: RunningServer, image: bytes) -> None:
    function = {"name": "look", "arguments": "{}"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    shown: dict[str, Any] = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url_of(image)}}]}
    same = [{"role": "user", "content": "look"}, call, {"role": "tool", "tool_call_id": "1", "content": "a mill"}]
    limits = {"model": "tiny", "temperature": 0}
    chat = server.post("/v1/chat/completions", {"messages": [*same, shown], "max_tokens": NUM_TOKENS, **limits}).json()
    text = chat["choices"][0]["message"]["content"]
    parts = [{"type": "input_text", "text": "a mill"}, {"type": "input_image", "image_url": url_of(image)}]
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "1", **function},
        {"type": "function_call_output", "call_id": "1", "output": parts},
    ]
    responses = server.post("/v1/responses", {"input": items, "max_output_tokens": NUM_TOKENS, **limits}).json()
    assert responses["output"][-1]["content"][0]["text"] == text
    assert responses["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(image).decode()}
    blocks = [{"type": "text", "text": "a mill"}, {"type": "image", "source": source}]
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": blocks}]},
    ]
    answer = server.post("/v1/messages", {"messages": messages, "max_tokens": NUM_TOKENS, **limits}).json()
    assert answer["content"][0]["text"] == text
    assert (
        answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    )


def test_sound_is_refused_by_name(server: RunningServer) -> None:
    body = chat_body()
    body["messages"] = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": ""}}]}]
    refusal = server.post("/v1/chat/completions", body)
    assert refusal.status_code == 400
    assert refusal.json()["error"]["message"] == "this model takes no sound; it takes images"


def test_bench_sends_images(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    before = server.settled_metric("mm_cache_queries_total")
    flags = ["--url", server.url, "--num-prompts", "3", "--images", "2", "--image-size", "64x32", "--num-warmups", "0"]
    assert main(["bench", "serve", *flags, "--output-len", "4:4"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["completed"], document["workload"]["num_images"]) == (3, 2)
    server.wait_for(lambda: server.metric("mm_cache_queries_total") == before + 6)
    with pytest.raises(InvalidConfig, match="--image-size"):
        read_load(make_parser().parse(["--images", "1", "--image-size", "big"]))
