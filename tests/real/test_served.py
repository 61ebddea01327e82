"""A real model behind the server: chats that it keeps, calls of tools, KV on a disk, and heads that ranks share."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.conftest import DOWNLOADS
from tests.real.test_models import PROMPTS
from tests.serving.server.running_server import RunningServer, start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.server.process.launch import ENGINE_MODULE

NAME = "smollm2"
TOOL = {
    "name": "get_weather",
    "description": "Tell the weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
QUESTIONS = ("What is the capital of France? Answer in one sentence.", "And what is it known for? Be brief.")
LONG = "The miller counts the sacks that come and go, one by one, and writes each into his book. " * 20


@pytest.fixture(autouse=True)
def has_time() -> None:
    if not DOWNLOADS.is_dir():
        pytest.skip("minutes of work: make real")


@pytest.fixture(scope="module")
def engine(model_file: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., EngineConfig]:
    path, folder = str(model_file(NAME)), tmp_path_factory.mktemp("served")

    def config(**options: Any) -> EngineConfig:
        sizes = {"max_model_len": 1024, "max_num_seqs": 4, "kv_cache_memory_bytes": 128 << 20, "num_threads": 1}
        fields = {"download_dir": str(folder / "cache"), "weight_cache_dir": str(folder / "weights"), **sizes}
        return EngineConfig(model=path, **{**fields, **options})

    return config


@pytest.fixture(scope="module")
def server(engine: Callable[..., EngineConfig]) -> Iterator[RunningServer]:
    with start_server(engine(), ENGINE_MODULE, served_model_name=(NAME,)) as running:
        yield running


def test_a_chat_that_the_server_keeps_is_the_one_that_is_sent_whole(server: RunningServer) -> None:
    chats, responses = server.client.chat.completions, server.client.responses
    messages: list[Any] = []
    before = None
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        whole = chats.create(model=NAME, messages=messages, temperature=0, max_tokens=40)
        kept = responses.create(
            model=NAME, input=question, temperature=0, max_output_tokens=40, previous_response_id=before
        )
        assert kept.output_text == whole.choices[0].message.content
        assert kept.usage.input_tokens == whole.usage.prompt_tokens
        before = kept.id
        messages.append({"role": "assistant", "content": kept.output_text})
    assert "Paris" in messages[1]["content"]
    assert kept.usage.input_tokens_details.cached_tokens >= 16, "the chat so far"


def test_a_tool_is_called_by_its_schema(server: RunningServer) -> None:
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Lisbon, in degrees Celsius?"}]
    tools: list[Any] = [{"type": "function", "function": TOOL}]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        reply = server.client.chat.completions.create(
            model=NAME, messages=messages, tools=tools, tool_choice=choice, temperature=0, max_tokens=100
        )
        (call,) = reply.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == {"city", "unit"}
        assert isinstance(arguments["city"], str)
        assert arguments["unit"] in ("C", "F")


def complete(server: RunningServer, prompt: str, num_tokens: int = 24) -> Any:
    body = {"model": NAME, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "logprobs": 2}
    return server.post("/v1/completions", {**body, "ignore_eos": True}).json()


def cached(reply: Any) -> int:
    return (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@pytest.mark.timeout(600)
def test_a_killed_server_finds_its_kv_on_the_disk(
    server: RunningServer, engine: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    want = complete(server, LONG)
    stored = engine(kv_disk=str(tmp_path / "kv"), kv_disk_size=256 << 20)
    with start_server(stored, ENGINE_MODULE, served_model_name=(NAME,)) as first:
        reply = complete(first, LONG)
        full_pages = (reply["usage"]["total_tokens"] - 1) // 16
        first.wait_for(lambda: first.metric("kv_stored_tokens_total") >= 16 * full_pages)
        for pid in (first.process.pid, *first.children().values()):
            os.kill(pid, signal.SIGKILL)
    assert (cached(reply), reply["choices"]) == (0, want["choices"])
    with start_server(stored, ENGINE_MODULE, served_model_name=(NAME,)) as second:
        again = complete(second, LONG)
    assert cached(again) >= 0.9 * again["usage"]["prompt_tokens"]
    assert again["choices"] == want["choices"]


@pytest.mark.timeout(600)
def test_nine_heads_are_shared_by_three_ranks_and_not_by_two(
    server: RunningServer, engine: Callable[..., EngineConfig]
) -> None:
    with (
        pytest.raises(AssertionError, match=r"--tensor-parallel-size 2: .*what works: 1, 3"),
        start_server(engine(tensor_parallel_size=2), ENGINE_MODULE),
    ):
        pass
    want = [complete(server, prompt)["choices"][0]["text"] for prompt in PROMPTS[:3]]
    with start_server(engine(tensor_parallel_size=3), ENGINE_MODULE, served_model_name=(NAME,)) as ranks:
        assert [complete(ranks, prompt)["choices"][0]["text"] for prompt in PROMPTS[:3]] == want
