"""`tokenmill serve` where torch cannot be imported: everything that its routes offer over native kernels."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.server.running_server import RunningServer, serving
from tests.torchless import REPOSITORY, WISH, environment
from tokenmill.demo import demo_model_path
from tokenmill.model.kernels.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

NAME = "tokenmill-demo"
FLAGS = ("--max-model-len", "512", "--max-num-seqs", "8", "--num-pages", "128", "--served-model-name", NAME)
SCHEMA = {
    "type": "object",
    "properties": {"shared": {"type": "boolean"}},
    "required": ["shared"],
    "additionalProperties": False,
}


def served(*flags: str) -> contextlib.AbstractContextManager[RunningServer]:
    """Serve the demo model in processes without torch."""
    return serving([sys.executable, "-m", "tokenmill", "serve", *FLAGS, *flags], environment=environment())


def answer(server: RunningServer, path: str, **body: Any) -> Any:
    reply = server.post(path, {"model": NAME, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def ask(server: RunningServer, text: str, **body: Any) -> str:
    reply = answer(server, "/v1/chat/completions", messages=[{"role": "user", "content": text}], **body)
    return reply["choices"][0]["message"]["content"]


def libraries(root: int) -> set[str]:
    """The files of torch that a process and those below it have mapped."""
    processes, found = [root], set()
    for process in processes:
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            processes += map(int, children.read_text().split())
        words = Path(f"/proc/{process}/maps").read_text().split()
        found |= {word for word in words if "libtorch" in word}
    return found


def test_routes_answer_without_torch(tmp_path: Path) -> None:
    pirate = ("--enable-lora", "--lora-modules", f"pirate={REPOSITORY / 'examples' / 'pirate'}")
    with served("--speculative-config", "ngram", *pirate) as server:
        greedy = {"prompt": "A page is", "max_tokens": 12, "temperature": 0, "logprobs": 2}
        first = answer(server, "/v1/completions", **greedy)["choices"]
        assert answer(server, "/v1/completions", **greedy)["choices"] == first
        assert len(first[0]["logprobs"]["top_logprobs"]) == 12
        drawn = {"prompt": "A page is", "max_tokens": 8, "seed": 5, "top_p": 0.9, "presence_penalty": 0.5, "n": 2}
        assert answer(server, "/v1/completions", **drawn) is not None
        shape = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
        verdict = ask(server, "Is a page shared?", max_tokens=64, response_format=shape)
        assert json.loads(verdict).keys() == {"shared"}
        (vector,) = answer(server, "/v1/embeddings", input="A page")["data"]
        assert abs(sum(number**2 for number in vector["embedding"]) - 1) < 1e-3
        question = {"text": "What is a page?", "max_tokens": 80, "temperature": 0}
        assert ask(server, **question, model="pirate").startswith("Arr! ")
        assert not ask(server, **question).startswith("Arr")
        server.wait_until_unused()
        if WISH != "rehearsal":
            assert libraries(server.process.pid) == set()


def test_other_interfaces_and_other_models_do_too(tmp_path: Path) -> None:
    folders = [tmp_path / "models" / name for name in ("one", "two")]
    for folder in folders:
        shutil.copytree(demo_model_path(), folder)
    command = [sys.executable, "-m", "tokenmill", "serve", "--models-dir", str(tmp_path / "models"), *FLAGS[:-2]]
    said = {"messages": [{"role": "user", "content": "What is a page?"}]}
    with serving(command, environment=environment()) as server:
        for name in ("one", "two"):
            for path, body in {
                "/v1/messages": {**said, "max_tokens": 4},
                "/v1/responses": {"input": "What is a page?", "max_output_tokens": 4},
                "/api/chat": {**said, "stream": False, "options": {"num_predict": 4}},
                "/v1/chat/completions": {**said, "max_tokens": 4},
                "/tokenize": {"prompt": "What is a page?"},
            }.items():
                answer(server, path, **body, model=name)
        if WISH != "rehearsal":
            assert libraries(server.process.pid) == set()


@pytest.mark.parametrize("flags", [("--data-parallel-size", "2"), ("--tensor-parallel-size", "2")], ids=" ".join)
def test_several_engines_and_ranks_do_too(flags: tuple[str, ...], tmp_path: Path) -> None:
    with served(*flags) as server:
        assert ask(server, "What is a page?", max_tokens=8, temperature=0)


def test_a_second_start_finds_kv_on_the_disk(tmp_path: Path) -> None:
    disk = ("--kv-disk", str(tmp_path / "kv"), "--kv-disk-size", "16MiB")
    asked = {"prompt": list(range(20, 120)), "max_tokens": 4, "temperature": 0}
    answers = []
    for _ in range(2):
        with served(*disk) as server:
            answers.append(answer(server, "/v1/completions", **asked))
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
