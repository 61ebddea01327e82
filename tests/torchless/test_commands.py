"""The verbs of `tokenmill` where torch cannot be imported: they work, or say which extra to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torchless import REPOSITORY, WISH, environment
from tokenmill.model.kernels.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

needs_the_block = pytest.mark.skipif(WISH == "rehearsal", reason="torch is there in a rehearsal")


def tokenmill(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenmill", *arguments]
    return subprocess.run(
        command, env=environment(**settings), capture_output=True, text=True, check=False, timeout=120
    )


def said(*arguments: str) -> str:
    done = tokenmill(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_prompt_is_completed() -> None:
    assert said("complete", "--local", "--max-tokens", "8", "--temperature", "0", "A page is").strip()


def test_a_file_of_prompts_is_answered(tmp_path: Path) -> None:
    answers = tmp_path / "answers.jsonl"
    said("generate", "-i", str(REPOSITORY / "examples" / "batch.jsonl"), "-o", str(answers), "--max-num-seqs", "8")
    assert [json.loads(line) for line in answers.read_text().splitlines()]


def test_steps_are_recorded_and_replayed(tmp_path: Path) -> None:
    log, batch = tmp_path / "steps.jsonl", str(REPOSITORY / "examples" / "batch.jsonl")
    said("generate", "-i", batch, "-o", str(tmp_path / "answers.jsonl"), "--max-num-seqs", "8", "--step-log", str(log))
    assert said("replay", str(log)).endswith("plans, all identical\n")
    assert said("steps", str(log))


def test_a_file_of_texts_becomes_vectors(tmp_path: Path) -> None:
    texts, vectors = tmp_path / "texts.jsonl", tmp_path / "vectors.jsonl"
    texts.write_text('{"text": "A page"}\n{"text": "is shared"}\n')
    said("embed", "-i", str(texts), "-o", str(vectors))
    assert len(vectors.read_text().splitlines()) == 2


def test_the_machine_is_examined() -> None:
    done = tokenmill("doctor")
    assert "-> kernels" in done.stdout
    if WISH != "rehearsal":
        assert "torch        not installed" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("version",),
        ("list", "--catalogue"),
        ("estimate",),
        ("bench", "throughput", "--num-prompts", "2", "--input-len", "8", "--output-len", "4"),
        ("bench", "latency", "--input-len", "8", "--output-len", "2", "--batch-size", "1"),
    ],
    ids=" ".join,
)
def test_other_verbs_work(arguments: tuple[str, ...]) -> None:
    assert said(*arguments)


@needs_the_block
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--kernels", "torch"), "--kernels torch needs torch, which is not installed"),
        (("--dtype", "float16"), "--dtype float16 on a CPU needs torch, which is not installed"),
        (("--attention-backend", "cpu"), "--attention-backend cpu needs torch, which is not installed"),
        (("--device", "cuda"), "--device cuda needs torch, which is not installed (pip install 'tokenmill[gpu]')"),
    ],
    ids=str,
)
def test_a_server_that_needs_torch_says_so(flags: tuple[str, ...], sentence: str) -> None:
    done = tokenmill("serve", "--port", "0", *flags)
    assert done.returncode == 2
    assert sentence in done.stderr


@needs_the_block
def test_training_the_demo_says_so() -> None:
    command = [sys.executable, str(REPOSITORY / "examples" / "train_demo" / "train.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "training needs torch and safetensors: pip install 'tokenmill[torch]' safetensors\n"
