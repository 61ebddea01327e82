"""Weights packed once for all engines and later starts: the same bits, and nothing old or foreign taken for them."""

from __future__ import annotations

import gc
import os
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tokenmill
from tests.checkpoints import make_checkpoint
from tests.model.models.test_native_decoder import FORMATS, run
from tests.model.weights.quantized_layouts import CASES, quantize
from tests.model.weights.starts import ALONE, MAPPED, PACKED, Start
from tests.paging import random_schedule
from tokenmill.config.configs import EngineConfig
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.quantization.packed import UNQUANTIZED
from tokenmill.model.weights import sharing
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import ModelPlan, choose_formats, plan_model
from tokenmill.model.weights.packed_file import HEADER_BYTES
from tokenmill.model.weights.reads import Read
from tokenmill.model.weights.sharing import LoadedWeights, content_of, load_weights
from tokenmill.serving.server.process.launch import weight_memory
from tokenmill.startup.sizing.forms import held_bytes

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")


def logits(plan: ModelPlan, decoders: list[Decoder], seed: int) -> list[torch.Tensor]:
    """Of the same random prompts, by each decoder."""
    found = []
    for decoder in decoders:
        rng = np.random.default_rng(seed)
        lengths = [1, 17, int(rng.integers(2, 60))]
        sequences = [rng.integers(0, 331, length).tolist() for length in lengths]
        model = decoder, plan.kernels.native
        found.append(torch.cat(run(model, sequences, random_schedule(lengths, 24, rng), rng)))
    return found


def forbid_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(read: Read) -> None:
        raise AssertionError(f"{read.name} is read")

    monkeypatch.setattr(Read, "rows", refuse)


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        *(("qwen3", stored) for stored in (*FORMATS, "awq")),
        ("qwen3_moe", "bf16"),
        ("qwen3_moe", "int4"),
        ("llama", "bf16"),
    ],
)
def test_a_mapped_model_has_the_bits_of_a_packed_one_and_reads_no_weights(
    family: str, stored: str, tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, sizes = int(rng.integers(2**31)), {"hidden_size": 64, "intermediate_size": 64}
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    make_checkpoint(tmp_path / "model", family, seed=seed, tokenizer=False, dtype=torch.bfloat16, **sizes, **biases)
    start = Start(tmp_path, FORMATS.get(stored, UNQUANTIZED))
    if stored == "awq":
        quantize(start.model, *CASES["awq"], rng)
        start.formats = choose_formats(start.model, None)
    plan = start.plan()
    alone, first = plan.load(), start.load()
    forbid_reads(monkeypatch)
    second = start.load()
    assert first.source.startswith(PACKED)
    assert second.source == MAPPED
    want, *got = logits(plan, [alone, first.decoder, second.decoder], seed)
    assert all(torch.equal(one, want) for one in got)
    assert second.file_bytes >= plan.weight_bytes - sum(table.num_bytes for table in second.decoder.rotary.values())


def test_a_folder_that_others_may_write_in_is_not_used(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start.cache.mkdir()
    start.cache.chmod(0o777)
    assert start.load().source.startswith(ALONE)
    assert "others may write in this folder" in caplog.text
    assert list(start.cache.iterdir()) == []


def test_a_change_that_samples_of_the_files_miss_is_another_content(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number, and the time of the last change is set back."""
    monkeypatch.setattr(sharing, "fingerprint", lambda folder, *forms: blake2b("".join(forms).encode()).hexdigest())
    start.load()
    assert start.load().source == MAPPED
    path = start.model / "model.safetensors"
    before, tensors = path.stat(), load_file(path)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert start.load().source.startswith(PACKED)


def change_the_form(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start.formats = FORMATS["int8"]


def change_the_code(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "CODE", (*sharing.CODE, "config/configs.py"))


def change_the_config(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    path = start.model / "config.json"
    path.write_text(path.read_text() + " ")


@pytest.mark.parametrize("pattern", sharing.CODE)
def test_every_part_of_the_code_that_packs_weights_is_there(pattern: str) -> None:
    assert [path for place in tokenmill.__path__ for path in Path(place).glob(pattern)] or pattern == "_native*"


@pytest.mark.parametrize("change", [change_the_form, change_the_code, change_the_config])
def test_another_content_is_another_file(change: Any, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start.load()
    before = start.file
    change(start, monkeypatch)
    assert start.load().source.startswith(PACKED)
    assert len(list(start.cache.iterdir())) == 2
    assert before.exists()


def test_what_is_used_least_recently_makes_room_unless_it_is_in_use(start: Start) -> None:
    size = {}
    sources: dict[str, LoadedWeights] = {}
    for name in ("bf16", "int8", "int4"):
        start.formats = FORMATS[name]
        content = content_of(start.plan(), start.model)
        size[name] = HEADER_BYTES + content.num_bytes, f"{content.key}.weights"
        loaded = start.load(weight_cache_size=sum(bytes for bytes, _ in size.values()))
        assert loaded.source.startswith(PACKED)
        if name == "bf16":
            sources[name] = loaded
        os.utime(start.cache / size[name][1], (len(size), len(size)))
    del loaded
    gc.collect()
    # bf16 is the oldest but mapped, int8 is the oldest of the others.
    start.formats = FORMATS["int4 offset"]
    assert start.load(weight_cache_size=sum(bytes for bytes, _ in size.values())).source.startswith(PACKED)
    names = {path.name for path in start.cache.iterdir()}
    assert size["bf16"][1] in names
    assert size["int8"][1] not in names
    assert size["int4"][1] in names
    start.formats = FORMATS["int8"]
    assert start.load(weight_cache_size=1 << 20).source.startswith(ALONE)
    assert {path.name for path in start.cache.iterdir()} == names


def test_without_a_cache_engines_share_what_their_parent_holds(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with weight_memory() as memory:
        config = EngineConfig(weight_memory=memory)
        assert held_bytes(config) == 0
        alone = start.plan().load()
        first = start.load(weight_cache=False, weight_memory=memory)
        forbid_reads(monkeypatch)
        second = start.load(weight_cache=False, weight_memory=memory)
        want, *got = logits(start.plan(), [alone, first.decoder, second.decoder], 1)
        assert all(torch.equal(one, want) for one in got)
        assert first.source.startswith("packed into shared memory")
        assert second.source == "mapped from shared memory"
        assert held_bytes(config) == HEADER_BYTES + content_of(start.plan(), start.model).num_bytes
        assert second.file_bytes == 0, "the system does not count it as free"
    assert not start.cache.exists()


def test_memory_serves_where_the_cache_cannot(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start.cache.write_text("a file, no folder")
    with weight_memory() as memory:
        assert start.load(weight_memory=memory).source.startswith("packed into shared memory")
    assert f"packed weights are not kept in {start.cache}" in caplog.text


def test_kernels_that_keep_no_packed_weights_leave_no_files(start: Start) -> None:
    kernels = TorchKernels("float32", "cpu")
    plan = plan_model(start.model, read_architecture(start.model), kernels)
    config = EngineConfig(weight_cache_dir=str(start.cache))
    assert load_weights(plan, start.model, config, lambda done, total: None).source.startswith(ALONE)
    assert not start.cache.exists()
