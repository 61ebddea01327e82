"""Adapters in slots of a device: the kernels against torch, and an engine on a GPU that does not exist."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.runner.fake_platform import FakePlatform
from tests.engine.runner.test_drafts import KINDS, requests
from tests.engine.runner.test_not_numbers import run
from tests.engine.runner.told import assert_same, told
from tests.model.adapters.trained import LINEARS, make_adapter
from tests.model.kernels.gpu import DEVICE, HALF
from tokenmill.config.configs import EngineConfig
from tokenmill.core.adapters import AdapterRef
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.messages import AddRequest
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.runner.cuda_graphs import DecodeGraphs
from tokenmill.model.adapters.requests import AdapterRequests
from tokenmill.model.kernels.adapter_parts import AdapterModule
from tokenmill.model.kernels.triton.adapters import SlotEmbedding, SlotMatrix
from tokenmill.startup.assembly.setup import build_engine
from tokenmill.startup.machine.device import check

NUM_ADAPTERS = 3
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_pages": 60, "page_size": 4}
SMALL |= {"max_model_len": 48, "dtype": "float32", "num_threads": 1, "device": "cpu", "enable_lora": True}
REPORTED = {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 1}


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("sizes", [(24, [40], 5), (300, [32, 16, 16], 8), (64, [70, 70], 1)])
def test_rows_have_what_torch_adds(
    sizes: tuple[int, list[int], int], dtype: torch.dtype, rng: np.random.Generator
) -> None:
    in_size, counts, rank = sizes
    starts = np.cumsum([0, *counts[:-1]]).tolist()
    parts = list(zip(starts, counts, strict=True))
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    matrix = SlotMatrix(NUM_ADAPTERS, rank, in_size, parts, torch.empty(0, dtype=dtype, device=DEVICE))
    adapters: list[list[AdapterModule]] = []
    for slot in range(NUM_ADAPTERS):
        modules = []
        for start, count in parts[slot % len(parts) :]:  # some add nothing to the first parts
            own = int(rng.integers(1, rank + 1))
            modules.append(AdapterModule(start, drawn(own, in_size), drawn(count, own), float(rng.uniform(0.2, 3))))
        matrix.fill(slot, [AdapterModule(0, drawn(rank, in_size), drawn(counts[0], rank), 9.0)])  # who was there before
        matrix.fill(slot, modules)
        adapters.append(modules)
    slots = rng.integers(-1, NUM_ADAPTERS, 13)
    x, y = drawn(13, in_size), drawn(13, sum(counts))
    want = y.double()
    for row, slot in enumerate(slots.tolist()):
        for one in adapters[slot] if slot >= 0 else ():
            added = one.b.double() @ (one.a.double() @ x[row].double())
            want[row, one.start : one.start + len(one.b)] += one.scale * added
    on_device = torch.from_numpy(slots.astype(np.int32)).to(DEVICE)
    got = matrix.add(x.to(DEVICE), y.clone().to(DEVICE), on_device).cpu()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert torch.allclose(got.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
    assert torch.equal(got[slots < 0], y[slots < 0]), "rows without an adapter keep their bits"
    alone = matrix.add(x[3:4].to(DEVICE), y[3:4].clone().to(DEVICE), on_device[3:4]).cpu()
    assert torch.equal(alone, got[3:4]), "a row's sums do not depend on the others"


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("kind", ["embedding", "head"])
def test_embedding_and_head_have_what_torch_adds(kind: str, dtype: torch.dtype, rng: np.random.Generator) -> None:
    tokens, size, rank, num_slots = 331, 40, 5, 5
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 31)))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    like = torch.empty(0, dtype=dtype, device=DEVICE)
    in_size, out_size = (tokens, size) if kind == "embedding" else (size, tokens)
    embedding = SlotEmbedding(num_slots, rank, (tokens, size), like)
    matrix = SlotMatrix(num_slots, rank, size, [(0, tokens)], like)
    held: dict[int, AdapterModule] = {}
    for slot in range(num_slots):
        memory = embedding if kind == "embedding" else matrix
        memory.fill(slot, [AdapterModule(0, drawn(rank, in_size), drawn(out_size, rank), 9.0)])  # who was there before
        if slot % 2:  # the others have none of it
            own = int(rng.integers(1, rank + 1))
            held[slot] = AdapterModule(0, drawn(own, in_size), drawn(out_size, own), float(rng.uniform(0.2, 3)))
        memory.fill(slot, [held[slot]] if slot in held else [])
    slots, token_ids = rng.integers(-1, num_slots, 19), torch.from_numpy(rng.integers(0, tokens, 19))
    x, y = drawn(19, size), drawn(19, out_size)
    want, keep = y.double(), [row for row, slot in enumerate(slots.tolist()) if slot not in held]
    for row, slot in enumerate(slots.tolist()):
        if one := held.get(slot):
            a = one.a.double()
            inner = a[:, token_ids[row]] if kind == "embedding" else a @ x[row].double()
            want[row] += one.scale * (one.b.double() @ inner)
    on_device, got = torch.from_numpy(slots.astype(np.int32)).to(DEVICE), y.clone().to(DEVICE)
    if kind == "embedding":
        got = embedding.add(token_ids.to(DEVICE), got, on_device).cpu()
    else:
        got = matrix.add(x.to(DEVICE), got, matrix.holding(on_device)).cpu()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    assert torch.allclose(got.double(), want, rtol=tolerance, atol=tolerance * float(want.abs().max()))
    assert torch.equal(got[keep], y[keep]), "rows without an adapter of it keep their bits"


# By adapter: modules of layers, all with embedding and head, and the head alone.
TARGETS = (["q_proj", "up_proj"], [*LINEARS, "embed_tokens", "lm_head"], ["lm_head"])


def make_adapters(base: Path, folder: Path, seed: int) -> list[Path]:
    """Folders of one adapter of each kind."""
    folders = [folder / f"adapter{number}" for number in range(NUM_ADAPTERS)]
    for number, (own, targets) in enumerate(zip(folders, TARGETS, strict=True)):
        make_adapter(base, own, seed + number, r=1 + 3 * number, target_modules=targets)
    return folders


def tell(engine: Engine, wanted: list[AddRequest], folders: list[Path]) -> list[Any]:
    """Return the outputs of clients; every fourth request wants the base model."""
    adapters = engine.extension(AdapterRequests)
    assert adapters is not None
    for request in wanted:
        number = int(request.id) % (NUM_ADAPTERS + 1)
        if number < NUM_ADAPTERS:
            request.adapter = adapters.look_at(f"a{number}", str(folders[number]))
            assert isinstance(request.adapter, AdapterRef)
    outputs = run(engine, wanted)
    return [told(outputs[request.id]) for request in wanted]


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen3", {}), ("qwen3", {"enforce_eager": True}), ("granite", {})],
    ids=["graphs", "eager", "multiplied and scaled"],
)
def test_an_engine_tells_what_one_on_a_cpu_tells(
    family: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, used = random.Random(seed), []
    base = make_checkpoint(tmp_path / "base", family, attention_bias=True)
    folders = make_adapters(base, tmp_path, seed % 1000)

    def replay(graphs: DecodeGraphs, inputs: Any, starts: Any = None, original: Any = DecodeGraphs.run) -> Any:
        used.append(id(graphs))
        return original(graphs, inputs, starts)

    monkeypatch.setattr(DecodeGraphs, "run", replay)
    # Two slots for three adapters: one is filled anew while others run.
    config = EngineConfig(model=str(base), **{**SMALL, "max_loras": 2, "max_lora_rank": 8, **options}).resolve()
    # And a report on a prompt, which has the head of its row.
    wanted = requests(rng, [KINDS[0], KINDS[1], KINDS[4], KINDS[3], REPORTED, REPORTED], 8)
    told_by = []
    for platform in (None, FakePlatform()):
        engine = build_engine(config, platform=platform).engine
        try:
            told_by.append(tell(engine, wanted, folders) + tell(engine, wanted[3:], folders))  # and the base alone
        finally:
            engine.close()
    assert_same(*told_by, is_exact=False)
    assert len(set(used)) == (0 if options else 2), "steps with adapters have graphs of their own, and others theirs"


def test_ranks_on_gpus_have_none() -> None:
    config = EngineConfig(device="cpu", dtype="float32", enable_lora=True, tensor_parallel_size=2).resolve()
    with pytest.raises(InvalidConfig, match="--enable-lora needs one GPU"):
        check(config, FakePlatform())
