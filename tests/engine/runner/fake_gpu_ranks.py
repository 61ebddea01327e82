"""Cases of the fake GPU: several ranks, each on one of its own, in a process of its own.

    python -m tests.engine.runner.fake_gpu_ranks CONFIG SEEN

runs a later rank; its record is written to SEEN. Ranks share memory as they always do; what goes from device to device
is noted, and answered with memory of the right shape.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from tests.checkpoints import make_checkpoint
from tests.engine.runner.fake_gpu import SEEN
from tests.engine.runner.fake_gpu_engines import LENGTHS, SMALL, on_fake_gpu, requests, run
from tests.engine.runner.fake_gpu_platform import FakeGpu
from tests.model.weights.gguf_writer import write_gguf
from tokenmill.config.configs import EngineConfig
from tokenmill.engine.parallel.messages import Command
from tokenmill.engine.parallel.shared_memory import SharedMemory
from tokenmill.model.weights.hub import fetch
from tokenmill.startup.assembly.device_follower import build_device_follower
from tokenmill.startup.ranks.group import Group, config_of_rank

TWO: dict[str, Any] = {"tensor_parallel_size": 2}
STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
CONTEXT: dict[str, Any] = {"context_parallel_size": 2, "page_size": 256, "num_pages": 30, "max_model_len": 1536}
# A split and more, and a prompt of which each rank attends its chunks.
LONG = (5, 1, 300, 600, 1200)
# Each rank's columns end with a block.
_OF_BLOCKS = {"hidden_size": 64, "intermediate_size": 128}
TIMEOUT_SECONDS = 60.0


def ranks(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """Every case, by name."""

    def several(family: str = "qwen3", **options: Any) -> Callable[[], dict[str, Any]]:
        return partial(run_ranks, folder, family, **options)

    return {
        "two ranks": several(**TWO),
        "two ranks, experts, many rows": several("qwen3_moe", max_num_seqs=17, **TWO),
        "two ranks, windows and sinks": several("gpt_oss", **TWO),
        "two ranks, eager": several(enforce_eager=True, **TWO),
        "two ranks, drafts": several(speculative_config="ngram", **TWO),
        "two ranks, fp8": several(quantization="fp8", **TWO),
        "two ranks, blocks": partial(run_ranks, folder, "qwen3", layout="Q8_0", load_format="auto", **TWO),
        "two stages": several(**STAGES),
        "two stages, windows": several("gemma3", **STAGES),
        "two stages, experts, eager": several("qwen3_moe", enforce_eager=True, **STAGES),
        "two stages of two ranks": several(**STAGES, **TWO),
        "one context": several(max_num_batched_tokens=600, **CONTEXT),
        "one context, experts": several("qwen3_moe", max_num_batched_tokens=600, **CONTEXT),
    }


def run_ranks(folder: Path, family: str, layout: str | None = None, **options: Any) -> dict[str, Any]:
    """Run requests of all kinds over several ranks; returns what was seen on any of them."""
    shape = {"max_position_embeddings": 2048, **(_OF_BLOCKS if layout else {})}
    model = make_checkpoint(folder / f"ranks of {family}{layout or ''}", family, seed=0, **shape)
    if layout is not None:
        model = fetch(str(write_gguf(model, family, layout)), None, str(folder / "cache"))
    place = Path(tempfile.mkdtemp(prefix="ranks-", dir=folder)) / "ranks"
    shared = {**SMALL, **options, "rendezvous": str(place), "rank_timeout": TIMEOUT_SECONDS}
    config = EngineConfig(model=str(model), **shared).resolve()
    wanted = requests(2 + config.max_num_seqs, LONG if config.context_parallel_size > 1 else LENGTHS)
    num_posts = Counter[str]()

    def post(memory: SharedMemory, command: Command, original: Callable[..., None] = SharedMemory.post) -> None:
        num_posts["all"] += 1
        original(memory, command)

    def begin() -> None:
        # Later commands are steps of requests.
        begun = _begun(str(place))
        begun.with_suffix(".part").write_text(str(num_posts["all"]))
        begun.with_suffix(".part").rename(begun)

    with peers(config, place) as records, patch.object(SharedMemory, "post", post):
        own = run(model, wanted, begin=begin, **shared)
    for record in records:
        own["copies"] += record["copies"]
        own["late"] = sorted({*own["late"], *record["late"]})
        for name, count in record["host_arguments"].items():
            own["host_arguments"][name] = own["host_arguments"].get(name, 0) + count
    return own


@contextmanager
def peers(config: EngineConfig, place: Path) -> Iterator[list[dict[str, Any]]]:
    """The later ranks of an engine; their records are in the list at their end."""
    started, files, records = [], [], list[dict[str, Any]]()
    for rank in range(1, config.num_ranks):
        path, seen = place.with_suffix(f".config-{rank}"), place.with_suffix(f".seen-{rank}")
        path.write_bytes(msgspec.json.encode(dataclasses.replace(config, rank=rank)))
        command = [sys.executable, "-m", __spec__.name, str(path), str(seen)]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        files.append(seen)
    try:
        yield records
    finally:
        for one in started:
            _, errors = one.communicate(timeout=TIMEOUT_SECONDS)
            assert one.returncode == 0, errors[-2000:]
        records += [json.loads(file.read_text()) for file in files]


def _begun(place: str) -> Path:
    return Path(f"{place}.begun")


def main() -> None:
    """Follow rank 0 to its end."""
    config = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=EngineConfig)
    begun, num_commands = _begun(config.rendezvous), 0

    def count(has_work: bool) -> None:
        nonlocal num_commands
        num_commands += has_work
        if SEEN.phase == "start" and begun.exists() and num_commands > int(begun.read_text()):
            SEEN.phase = "step"

    with on_fake_gpu():
        group = Group(config)
        try:
            follower = build_device_follower(config_of_rank(config), group, FakeGpu())
            follower.run(count)
            follower.close()
        except BaseException as error:
            group.abandon(error)
            raise
    Path(sys.argv[2]).write_text(json.dumps(SEEN.told()))


if __name__ == "__main__":
    main()
