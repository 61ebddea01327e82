"""A long prompt after kill -9 and a start: its KV from the disk tier, or computed again; and what an idle tier costs.

    python benchmarks/disk_tier.py [--prompt 32768] [--kv-cache-dtype int8] [--folder DIR] [--filled]

Qwen3-0.6B's shape with random weights, on the CPU. Three processes, one after the other: one without a tier, one with a
tier that is killed when all pages are stored, one that starts again. Of each: the seconds to the first token and the
tokens, which must be the same. Then what an idle tier adds to the engine's part of a decode step, without a model. One
line of JSON last. With `--filled` nothing is computed: the tier is filled with pages of zeros, and only the start after
it is measured, for machines that would take too long.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from tools.gpu.folders import QWEN3_0_6B, write_config

from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest
from tokenmill.core.plan import StepOutcome, StepPlan, StepResult
from tokenmill.core.request import CacheKey
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.transfers import SaveOrder, TransferSettings
from tokenmill.engine.loop.engine import Engine, ModelLimits
from tokenmill.engine.loop.step_log import LogHeader
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.transfer.connector import KVConnector
from tokenmill.engine.transfer.extension import KVTransfer, TransferExecutor
from tokenmill.engine.transfer.orders import Movers, PageSave
from tokenmill.engine.transfer.page_mover import RawPages
from tokenmill.engine.transfer.protocol import SourceContext
from tokenmill.engine.transfer.state import TransferState
from tokenmill.startup.assembly.kv_sources import disk_tier
from tokenmill.startup.assembly.setup import build_engine

OUTPUT_TOKENS = 16
IDLE_REQUESTS, IDLE_STEPS, IDLE_TURNS = 64, 100, 12


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompt", type=int, default=32768)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--filled", action="store_true", help="fill the tier with pages that nobody computed")
    parser.add_argument("--folder", default=None, help="where the tier is; its files are removed")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    parser.add_argument("--model", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        measure = {"idle": idle, "filled": fill}.get(options.part, answer)
        print(json.dumps(measure(options)), flush=True)
        if options.part in ("filled", "stored"):
            time.sleep(600)  # to be killed
        return
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=options.folder) as tier:
        options.model, options.folder = str(write_config(Path(folder), QWEN3_0_6B)), tier
        if options.filled:
            found = {part: run(options, part) for part in ("filled", "restored")}
            found["restored"].pop("tokens")
            print(json.dumps({"prompt": options.prompt, "kv_cache_dtype": options.kv_cache_dtype, **found}))
            return
        found = {part: run(options, part) for part in ("computed", "stored", "restored", "idle")}
    computed, restored = found["computed"], found["restored"]
    tokens = {part: found[part].pop("tokens") for part in ("computed", "stored", "restored")}
    print(
        json.dumps(
            {
                "prompt": options.prompt,
                "kv_cache_dtype": options.kv_cache_dtype,
                **found,
                "same_tokens": tokens["computed"] == tokens["stored"] == tokens["restored"],
                "sooner": round(computed["first_token_s"] / restored["first_token_s"], 1),
            }
        )
    )


def run(options: argparse.Namespace, part: str) -> dict[str, Any]:
    """Run one part in a process of its own, and kill that as soon as it has spoken."""
    command = [sys.executable, __file__, "--part", part, "--model", options.model, "--folder", options.folder]
    command += ["--prompt", str(options.prompt), "--kv-cache-dtype", options.kv_cache_dtype]
    command += ["--quantization", options.quantization]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found: dict[str, Any] = json.loads(process.stdout.readline())
        finally:
            process.kill()
    print(part, {name: value for name, value in found.items() if name != "tokens"}, file=sys.stderr)
    return found


def start(options: argparse.Namespace, has_tier: bool, num_requests: int = 1) -> Engine:
    """An engine whose KV memory holds the prompt, and some more."""
    config = EngineConfig(
        model=options.model,
        device="cpu",
        load_format="dummy",
        max_num_seqs=num_requests,
        max_model_len=options.prompt + 2 * OUTPUT_TOKENS,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
        num_pages=options.prompt // 16 + 64 * num_requests,
        kv_disk=options.folder if has_tier else None,
        kv_disk_size=16 << 30,
    )
    built = build_engine(config.resolve())
    for _ in built.idle_work:
        pass  # the memory of KV is taken, as by a server that nobody has asked yet
    return built.engine


def answer(options: argparse.Namespace) -> dict[str, Any]:
    """Answer the prompt; with a tier, wait until all of it is stored."""
    engine = start(options, options.part != "computed")
    prompt = prompt_of(options)
    params = SamplingParams(temperature=0.6, seed=1, ignore_eos=True, max_tokens=OUTPUT_TOKENS)
    began = time.perf_counter()
    engine.add(AddRequest(id="0", prompt_token_ids=prompt, params=params))
    tokens: list[int] = []
    first, num_cached = 0.0, 0
    while len(tokens) < OUTPUT_TOKENS:
        for output in engine.step():
            first = first or time.perf_counter() - began
            num_cached = max(num_cached, output.num_cached_tokens)
            tokens += output.token_ids
    found = {"first_token_s": round(first, 2), "from_tier": num_cached / options.prompt, "tokens": tokens}
    transfers = engine.scheduler.resource(TransferState)
    if options.part == "stored" and transfers is not None:
        ended = time.perf_counter()
        while transfers.is_busy:
            engine.step()
        found["stored_after_s"] = round(time.perf_counter() - ended, 2)
    return found


def prompt_of(options: argparse.Namespace) -> list[int]:
    """The prompt, the same in all processes."""
    rng = random.Random(0)
    return [rng.randrange(1, 250) for _ in range(options.prompt)]


def fill(options: argparse.Namespace) -> dict[str, Any]:
    """Store pages of the prompt as they lie in an engine's memory that has computed nothing."""
    engine = start(options, has_tier=True)
    assert isinstance(engine.executor, TransferExecutor), "an engine with a tier"
    (tier,), movers = engine.executor.connector.sources, engine.executor.connector.movers
    num_pages, done = options.prompt // 16, threading.Event()
    tokens = np.array(prompt_of(options)[: 16 * num_pages], dtype=np.int32)
    key = CacheKey(engine.limits.fingerprint)
    began = time.perf_counter()
    tier.save(PageSave(SaveOrder(1, 0, list(range(1, num_pages + 1))), key, tokens, movers, done.set))
    done.wait()
    seconds = time.perf_counter() - began
    return {"stored_s": round(seconds, 2), "gib_per_s": round(num_pages * movers.pages.page_bytes / seconds / 2**30, 2)}


class Counting:
    """An executor without a model: every request is brought a token."""

    def launch(self, plan: StepPlan) -> StepOutcome:
        """The outcome, at once."""
        count = len(plan.rows)
        result = StepResult(plan.step, np.full(count, 7, np.int32), np.arange(count + 1, dtype=np.int32))
        return StepOutcome(lambda: result)

    def recover(self) -> None:
        """Nothing was lost."""

    def close(self) -> None:
        """Nothing is running."""


def idle(options: argparse.Namespace) -> dict[str, Any]:
    """Processor microseconds of the engine's part of a decode step, with and without an idle tier, in turns."""
    engines = {name: without_model(options, has_tier=name == "tier") for name in ("none", "tier")}
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(IDLE_TURNS):
        for name, engine in engines.items():
            began = time.process_time()
            for _ in range(IDLE_STEPS):
                engine.step()
            times[name].append((time.process_time() - began) / IDLE_STEPS)
    medians = {name: 1e6 * statistics.median(found) for name, found in times.items()}
    costs = statistics.median([b - a for a, b in zip(times["none"], times["tier"], strict=True)])
    return {
        "requests": IDLE_REQUESTS,
        "step_us": {n: round(m) for n, m in medians.items()},
        "costs_us": round(1e6 * costs),
    }


def without_model(options: argparse.Namespace, has_tier: bool) -> Engine:
    """An engine whose requests all decode, on pages that are nowhere."""
    num_tokens = IDLE_STEPS * (IDLE_TURNS + 2)
    header = LogHeader(
        scheduler=SchedulerConfig(IDLE_REQUESTS, 8192),
        num_pages=IDLE_REQUESTS * (num_tokens // 16 + 2),
        page_size=16,
        enable_prefix_caching=True,
        max_model_len=2 * num_tokens,
        vocab_size=100,
        eos_token_ids=[],
        depth=1,
        transfers=TransferSettings(("disk",), save_chunk=1 << 20) if has_tier else None,
    )
    scheduler, executor, extensions = header.make_scheduler(), Counting(), []
    if (transfers := scheduler.resource(TransferState)) is not None:
        mover = RawPages([torch.zeros(1, 2, 4096, dtype=torch.uint8)], "bytes")
        tier = disk_tier(SourceContext(mover, 16, 2, "idle"), Path(options.folder), 1 << 20)
        connector = KVConnector([tier], transfers, Movers(mover))
        executor = TransferExecutor(executor, connector)
        extensions.append(KVTransfer(scheduler, connector))
    engine = Engine(scheduler, executor, ModelLimits(2 * num_tokens, 100, frozenset()), extensions=extensions)
    params = SamplingParams(ignore_eos=True, max_tokens=num_tokens)
    for number in range(IDLE_REQUESTS):
        engine.add(AddRequest(id=str(number), prompt_token_ids=[number % 90 + 1] * 8, params=params))
    while len(engine.step()) < IDLE_REQUESTS:
        pass
    return engine


if __name__ == "__main__":
    main()
