"""One model on two machines, which here are two addresses of one: they find each other, lose each other, and go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.eventually import eventually
from tests.serving.server.running_server import children_of, free_port, is_alive
from tokenmill.core.errors import EngineFailed
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.llm.llm import LLM
from tokenmill.model.kernels.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

SIZES = {"num_pages": 60, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_threads": 1, "weight_cache": False}
HOST = "127.0.0.2"


class Machines:
    """The other machine of two, and what both are told."""

    def __init__(self, folder: Path, model: Path) -> None:
        secret = folder / "secret"
        secret.write_text("a secret of sixteen bytes")
        secret.chmod(0o600)
        self.options: dict[str, Any] = {
            "pipeline_parallel_size": 2,
            "nnodes": 2,
            "master_addr": HOST,
            "master_port": free_port(HOST),
            "master_secret": str(secret),
            **SIZES,
        }
        self.log = (folder / "log").open("w+")
        self.agent = subprocess.Popen(command(model, self.options), stderr=self.log)

    def rank(self) -> int:
        """The process of the rank that runs there."""
        (pid,) = children_of(self.agent.pid)
        return pid

    def said(self) -> list[str]:
        """Return its output so far."""
        self.log.seek(0)
        return self.log.read().splitlines()


def command(model: Path, options: dict[str, Any]) -> list[str]:
    """Return the command line of the other machine."""
    flags = [word for name, value in options.items() for word in flag(name, value)]
    return [sys.executable, "-m", "tokenmill", "serve", str(model), *flags, "--node-rank", "1"]


def flag(name: str, value: Any) -> list[str]:
    name = name.replace("_", "-")
    return [f"--{'' if value else 'no-'}{name}"] if isinstance(value, bool) else [f"--{name}", str(value)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=3)


@pytest.fixture
def machines(tmp_path: Path, model: Path) -> Iterator[Machines]:
    both = Machines(tmp_path, model)
    yield both
    both.agent.kill()
    both.agent.wait()
    both.log.close()


def answers(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=1, temperature=0.9)
    return [one.outputs[0].token_ids for one in llm.generate(["hello", "and a longer prompt " * 6, "x"], params)]


def test_a_machine_takes_part_in_one_engine_after_the_other(machines: Machines, model: Path) -> None:
    alone = LLM(model, **SIZES)
    want = answers(alone)
    alone.close()
    llm = LLM(model, **machines.options)
    assert answers(llm) == want
    first = machines.rank()
    os.kill(first, signal.SIGKILL)
    with pytest.raises(EngineFailed, match="stage 1 is gone"):
        answers(llm)
    llm.close()
    again = LLM(model, **machines.options)
    assert machines.rank() != first and not is_alive(first)
    assert answers(again) == want
    again.close()
    eventually(lambda: not children_of(machines.agent.pid))
    machines.agent.send_signal(signal.SIGTERM)
    assert machines.agent.wait(20) == 0
    assert machines.said()[:2] == [
        f"machine 1 of 2: waits for the first one at tcp://{HOST}:{machines.options['master_port']}",
        "machine 1 of 2: starts rank 1",
    ]


def test_a_machine_with_other_flags_is_refused(machines: Machines, model: Path) -> None:
    with pytest.raises(EngineFailed, match="stage 1 runs another model than stage 0, or has been given other flags"):
        LLM(model, **{**machines.options, "max_num_batched_tokens": 48})
    eventually(lambda: not children_of(machines.agent.pid))


def test_a_machine_without_the_secret_says_so(tmp_path: Path, model: Path) -> None:
    options = {"pipeline_parallel_size": 2, "nnodes": 2, "master_secret": tmp_path / "none"}
    refused = subprocess.run(command(model, options), check=False, capture_output=True, text=True)
    assert refused.returncode == 2 and refused.stderr.startswith("error: the secret file")
