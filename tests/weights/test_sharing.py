"""Weights packed once for all engines and later starts: the same bits, and nothing that is damaged, old or foreign."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import stat
import subprocess
import sys
import threading
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import make_checkpoint
from tests.models.test_native_decoder import FORMATS, run
from tests.paging import random_schedule
from tests.weights.quantized_layouts import CASES, quantize
from tokenmill.config import EngineConfig
from tokenmill.kernels.native import load_kernels
from tokenmill.kernels.select import select_kernels
from tokenmill.kernels.torch_kernels import TorchKernels
from tokenmill.machine.forms import held_bytes
from tokenmill.models.decoder import Decoder
from tokenmill.quantization.packed import UNQUANTIZED, PackedFormats
from tokenmill.replicas.weight_memory import weight_memory
from tokenmill.weights import packed_file, sharing
from tokenmill.weights.checkpoint import read_architecture
from tokenmill.weights.loader import ModelPlan, choose_formats, plan_model
from tokenmill.weights.packed_file import HEADER_BYTES, PackedFile
from tokenmill.weights.reads import Read
from tokenmill.weights.sharing import LoadedWeights, content_of, load_weights

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

PACKED, MAPPED = "packed into the cache", "mapped from the cache"


class Start:
    """One model and one cache folder, and engines' starts with them."""

    def __init__(self, folder: Path, formats: PackedFormats = UNQUANTIZED) -> None:
        self.model, self.cache, self.formats = folder / "model", folder / "cache", formats

    @property
    def file(self) -> Path:
        (file,) = self.cache.iterdir()
        return file

    def plan(self) -> ModelPlan:
        kernels, _ = select_kernels("native", "cpu", torch.bfloat16, 1, self.formats)
        return plan_model(self.model, read_architecture(self.model), kernels)

    def load(self, **options: Any) -> LoadedWeights:
        config = EngineConfig(model=str(self.model), **{"weight_cache_dir": str(self.cache), **options})
        return load_weights(self.plan(), self.model, config, lambda done, total: None)


@pytest.fixture
def start(tmp_path: Path, rng: np.random.Generator) -> Start:
    make_checkpoint(tmp_path / "model", "qwen3", seed=int(rng.integers(2**31)), tokenizer=False, dtype=torch.bfloat16)
    return Start(tmp_path)


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


def truncate(file: Path, rng: np.random.Generator) -> None:
    os.truncate(file, int(rng.integers(1, file.stat().st_size)))


def lengthen(file: Path, rng: np.random.Generator) -> None:
    os.truncate(file, file.stat().st_size + 4096)


def flip_a_bit(file: Path, rng: np.random.Generator) -> None:
    flip(file, HEADER_BYTES + int(rng.integers(file.stat().st_size - HEADER_BYTES)), rng)


def flip_a_bit_of_the_header(file: Path, rng: np.random.Generator) -> None:
    flip(file, int(rng.integers(file.read_bytes()[:4096].rstrip(b"\0").__len__())), rng)


def flip(file: Path, place: int, rng: np.random.Generator) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 1 << int(rng.integers(8))]))


def exchange_rows(file: Path, rng: np.random.Generator) -> None:
    """Two cache lines, which have the same sum in any order."""
    content = bytearray(file.read_bytes())
    one, other = slice(HEADER_BYTES, HEADER_BYTES + 64), slice(HEADER_BYTES + 64, HEADER_BYTES + 128)
    content[one], content[other] = content[other], content[one]
    file.write_bytes(content)


def forget_the_header(file: Path, rng: np.random.Generator) -> None:
    """As a writer leaves it that is killed."""
    with file.open("r+b") as opened:
        opened.write(bytes(4096))


def swell_the_header(file: Path, rng: np.random.Generator) -> None:
    with file.open("r+b") as opened:
        opened.write(b"[" * 4096)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        lengthen,
        flip_a_bit,
        flip_a_bit_of_the_header,
        exchange_rows,
        forget_the_header,
        swell_the_header,
    ],
)
def test_what_is_damaged_is_packed_anew(
    damage: Any, start: Start, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    start.load()
    whole = start.file.read_bytes()
    damage(start.file, rng)
    assert start.file.read_bytes() != whole
    assert start.load().source.startswith(PACKED)
    assert "is incomplete or damaged" in caplog.text
    assert start.file.read_bytes() == whole
    assert start.load().source == MAPPED


def test_what_is_damaged_while_it_is_used_is_left_alone(start: Start, rng: np.random.Generator) -> None:
    used = start.load()
    flip_a_bit(start.file, rng)
    damaged = start.file.read_bytes()
    assert start.load().source.startswith("packed in ")
    assert start.file.read_bytes() == damaged
    assert used.source.startswith(PACKED)


def as_link(file: Path, away: Path) -> None:
    file.rename(away)
    file.symlink_to(away)


def as_pipe(file: Path, away: Path) -> None:
    file.rename(away)
    os.mkfifo(file, 0o600)


def of_another_user(file: Path, away: Path) -> None:
    os.link(file, away)
    os.chown(file, 12345, -1)


def open_to_others(file: Path, away: Path) -> None:
    os.link(file, away)
    file.chmod(0o620)


@pytest.mark.parametrize("change", [as_link, as_pipe, of_another_user, open_to_others])
def test_what_is_not_ours_alone_is_removed_and_never_opened(
    change: Any, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if change is of_another_user and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    start.load()
    away = tmp_path / "away"
    whole = start.file.read_bytes()
    change(start.file, away)
    assert start.load().source.startswith(PACKED)
    assert "is no file of this user alone" in caplog.text
    status = start.file.lstat()
    assert stat.S_ISREG(status.st_mode)
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), 0o600)
    assert status.st_ino != away.stat().st_ino
    assert away.read_bytes() == whole


def test_a_folder_that_others_may_write_in_is_not_used(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    start.cache.mkdir()
    start.cache.chmod(0o777)
    assert start.load().source.startswith("packed in ")
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
    monkeypatch.setattr(sharing, "CODE", (*sharing.CODE, "config.py"))


def change_the_config(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    path = start.model / "config.json"
    path.write_text(path.read_text() + " ")


@pytest.mark.parametrize("change", [change_the_form, change_the_code, change_the_config])
def test_another_content_is_another_file(change: Any, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start.load()
    before = start.file
    change(start, monkeypatch)
    assert start.load().source.startswith(PACKED)
    assert len(list(start.cache.iterdir())) == 2
    assert before.exists()


def test_of_two_that_start_at_once_one_packs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is held up in its packing until the second waits for it."""
    waits, is_packing, load = threading.Event(), threading.Event(), ModelPlan.load
    packs: list[ModelPlan] = []

    def slowly(plan: ModelPlan, *arguments: Any) -> Decoder:
        packs.append(plan)
        is_packing.set()
        assert waits.wait(30)
        return load(plan, *arguments)

    def second() -> None:
        assert is_packing.wait(30)
        config = EngineConfig(weight_cache_dir=str(start.cache))
        sources.append(load_weights(start.plan(), start.model, config, lambda done, total: waits.set()).source)

    monkeypatch.setattr(ModelPlan, "load", slowly)
    sources: list[str] = []
    thread = threading.Thread(target=second)
    thread.start()
    sources.append(start.load().source)
    thread.join(30)
    assert len(packs) == 1
    assert sorted(source[:6] for source in sources) == ["mapped", "packed"]


def test_who_waits_too_long_packs_alone(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    start.load()
    file = PackedFile(start.file, content_of(start.plan(), start.model))
    assert file.lock(fcntl.LOCK_EX)
    monkeypatch.setattr(packed_file, "PATIENCE", 0.0)
    assert start.load().source.startswith("packed in ")
    file.close()
    monkeypatch.undo()
    assert start.load().source == MAPPED


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
    assert start.load(weight_cache_size=1 << 20).source.startswith("packed in ")
    assert {path.name for path in start.cache.iterdir()} == names


def test_a_full_disk_leaves_nothing_behind(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert start.load().source.startswith("packed in ")
    assert start.file.stat().st_size == 0
    monkeypatch.undo()
    assert start.load().source.startswith(PACKED)


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
    kernels = TorchKernels(torch.float32, "cpu")
    plan = plan_model(start.model, read_architecture(start.model), kernels)
    config = EngineConfig(weight_cache_dir=str(start.cache))
    assert load_weights(plan, start.model, config, lambda done, total: None).source.startswith("packed in ")
    assert not start.cache.exists()


PSS = """
import sys
from pathlib import Path
from tokenmill.weights.packed_file import Claim, Content, claim
file, found = claim(Path(sys.argv[1]), Content(sys.argv[2], int(sys.argv[3])), print)
assert found is Claim.WHOLE
memory = file.map()
memory.sum()
print("mapped", flush=True)
sys.stdin.readline()
about, pss = "", 0
for line in open("/proc/self/smaps"):
    about = line if "-" in line.split()[0] else about
    pss += int(line.split()[1]) * 1024 if line.startswith("Pss:") and sys.argv[1] in about else 0
print(pss, flush=True)
sys.stdin.readline()
"""


def test_two_processes_hold_one_copy(start: Start) -> None:
    start.load()
    content = content_of(start.plan(), start.model)
    command = [sys.executable, "-c", PSS, str(start.file), content.key, str(content.num_bytes)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout.readline() == "mapped\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        held = sum(int(process.stdout.readline()) for process in processes)
        assert 0 < held <= 1.2 * (HEADER_BYTES + content.num_bytes)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
