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
from tests.model.adapters.trained import make_adapter
from tests.model.kernels.gpu import DEVICE, HALF
from tokenmill.config.configs import EngineConfig
from tokenmill.core.adapters import AdapterRef
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.messages import AddRequest
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.runner.cuda_graphs import DecodeGraphs
from tokenmill.model.adapters.requests import AdapterRequests
from tokenmill.model.kernels.adapter_parts import AdapterModule
from tokenmill.model.kernels.triton.adapters import SlotMatrix
from tokenmill.startup.assembly.setup import build_engine
from tokenmill.startup.machine.device import check

NUM_ADAPTERS = 3
SMALL: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_pages": 60, "page_size": 4}
SMALL |= {"max_model_len": 48, "dtype": "float32", "num_threads": 1, "device": "cpu", "enable_lora": True}


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


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "qwen3", attention_bias=True)


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    for number in range(NUM_ADAPTERS):
        targets = {} if number else {"target_modules": ["q_proj", "up_proj"]}
        make_adapter(base, folder / str(number), number, r=1 + 3 * number, **targets)
    return [folder / str(number) for number in range(NUM_ADAPTERS)]


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
@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_an_engine_tells_what_one_on_a_cpu_tells(
    options: dict[str, Any], base: Path, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng, used = random.Random(seed), []

    def replay(graphs: DecodeGraphs, inputs: Any, starts: Any = None, original: Any = DecodeGraphs.run) -> Any:
        used.append(id(graphs))
        return original(graphs, inputs, starts)

    monkeypatch.setattr(DecodeGraphs, "run", replay)
    # Two slots for three adapters: one is filled anew while others run.
    config = EngineConfig(model=str(base), **{**SMALL, "max_loras": 2, "max_lora_rank": 8, **options}).resolve()
    wanted = requests(rng, [KINDS[0], KINDS[1], KINDS[4], KINDS[3]], 8)
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
