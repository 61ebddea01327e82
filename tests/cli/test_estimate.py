"""`tokenmill estimate`: what it says agrees with what a start takes, and costs no download."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.machine_sizes import Machine, make_six_mib
from tests.model.weights.stand_in_hub import running_hub
from tests.remote_encoders import make_remote_encoder
from tokenmill.cli.main import main
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import OutOfMemory
from tokenmill.core.sizes import size_text
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.startup.assembly.setup import build_engine
from tokenmill.startup.sizing.forms import active_share

MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_six_mib(tmp_path_factory.mktemp("models") / "m")


def rows(output: str) -> dict[str, list[str]]:
    """The table by the first word of its lines."""
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in output.splitlines()]
    return {row[0]: row[1:] for row in cells if len(row) > 3}


def test_the_table_agrees_with_what_a_start_takes(
    folder: Path, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    context = int(rng.integers(100, 512))
    memory = int(rng.integers(40, 200)) * MIB
    flags = ["--device", "cpu", "--max-model-len", str(context), "--max-num-seqs", "9999"]
    given = ["--memory", str(memory), "--bandwidth", "10GB"]
    assert main(["estimate", str(folder), *flags, "--max-num-batched-tokens", "9999", *given]) == 0
    table = rows(capsys.readouterr().out)
    assert table["weights as"][3:] == [f"requests of {context}", "tokens/s of one"]
    speeds = []
    for form, quantization in (("bfloat16", "none"), ("int8", "int8"), ("int4", "int4")):
        weights, kv, cache, requests, speed = table[form]
        config = EngineConfig(
            model=str(folder), device="cpu", quantization=quantization, max_model_len=context, max_num_seqs=2
        )
        built = build_engine(config.resolve(), platform=Machine(1 << 30))
        built.engine.close()
        ready = built.ready
        page = ready.kv_bytes / (ready.num_pages + 1)
        assert weights == size_text(ready.weight_bytes)
        assert kv == size_text(page / ready.page_size)
        pages = int((memory - ready.weight_bytes) * 0.4 / page) - 1
        assert cache == size_text(pages * page)
        assert int(requests.replace(",", "")) == pages // -(-context // ready.page_size)
        # The embeddings of this model are no output head: a step looks up one row of them.
        read = ready.weight_bytes * active_share(read_architecture(folder)) + context * page / ready.page_size
        assert float(speed.replace(",", "")) == pytest.approx(1e10 / read, rel=0.01)
        speeds.append(float(speed.replace(",", "")))
    assert speeds == sorted(speeds)


def test_a_refused_start_shows_the_same_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = 4 * MIB
    config = EngineConfig(model=str(folder), device="cpu", max_num_seqs=2).resolve()
    with pytest.raises(OutOfMemory) as refusal:
        build_engine(config, platform=Machine(free))
    given = ["--device", "cpu", "--memory", str(free), "--bandwidth", "1GB"]
    assert main(["estimate", str(folder), "--max-num-seqs", "2", *given]) == 0
    shown, told = rows(capsys.readouterr().out), rows(str(refusal.value))
    assert {name: row[:-1] for name, row in shown.items()} == told
    assert told["bfloat16"][2:] == ["no room", "-"]


def test_ranks_that_share_a_context_have_a_part_of_the_kv_each(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["estimate", str(folder), "--device", "cpu", "--memory", str(64 * MIB), "--bandwidth", "10GB"]
    assert main(given) == 0
    alone = capsys.readouterr().out
    assert main([*given, "-cp", "2"]) == 0
    shared = capsys.readouterr().out
    assert "Each of 2 ranks has a part of the KV cache, " in shared and "ranks" not in alone
    assert rows(shared)["bfloat16"][:3] == rows(alone)["bfloat16"][:3]
    assert main([*given, "-cp", "2", "-tp", "2"]) == 2
    assert "ranks that share a context have the whole model each" in capsys.readouterr().err


def test_experts_that_a_token_is_not_sent_to_are_not_read(tmp_path: Path) -> None:
    sparse = read_architecture(make_checkpoint(tmp_path / "m", "qwen3_moe", num_experts=64, tie_word_embeddings=True))
    assert 0.05 < active_share(sparse) < 0.6
    dense = read_architecture(make_checkpoint(tmp_path / "d", "qwen3", tie_word_embeddings=True))
    assert active_share(dense) == 1


def test_a_config_alone_is_enough(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "some-model.json"
    path.write_text((folder / "config.json").read_text())
    assert main(["estimate", str(path), "--device", "cpu", "--memory", "1g", "--bandwidth", "10GB"]) == 0
    alone = rows(capsys.readouterr().out)
    assert main(["estimate", str(folder), "--device", "cpu", "--memory", "1g", "--bandwidth", "10GB"]) == 0
    assert alone == rows(capsys.readouterr().out)


ESTIMATE = """
import sys
from tokenmill.cli.main import main
for model in sys.argv[1:]:
    print("code", main(["estimate", model, "--memory", "1g", "--bandwidth", "10GB"]))
"""


def on_the_hub(endpoint: str, home: Path, *models: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: huggingface-hub reads HF_ENDPOINT once."""
    return subprocess.run(
        [sys.executable, "-c", ESTIMATE, *models],
        env={**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_on_the_hub_is_estimated_by_its_headers_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((folder / "config.json").read_text())
    with running_hub({"mill/m": folder, "mill/bare": bare}) as hub:
        done = on_the_hub(hub.url, tmp_path / "home", "mill/m", "mill/bare")
        weights = folder / "model.safetensors"
        assert weights.stat().st_size > 1_000_000 > hub.num_bytes["model.safetensors"] > 0
        assert set(hub.downloads) == {"config.json", "model.safetensors"}
    header = json.loads(weights.read_bytes()[8 : 8 + int.from_bytes(weights.read_bytes()[:8], "little")])
    size = max(tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__")
    assert f"on the hub: {size_text(size)} of F32" in done.stdout
    assert [line for line in done.stdout.splitlines() if line.startswith("code")] == ["code 0", "code 2"]
    assert "mill/bare has no weights in safetensors that can be read" in done.stderr
    assert main(["estimate", str(folder), "--memory", "1g", "--bandwidth", "10GB"]) == 0
    assert rows(done.stdout) == rows(capsys.readouterr().out)


def test_what_is_no_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", str(tmp_path / "nothing")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["estimate", "--memory", "much"]) == 2
    assert "'much' is not a size" in capsys.readouterr().err


def test_an_encoder_takes_memory_for_a_step_and_none_for_kv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 100, "num_hidden_layers": 3}
    config = {"architectures": ["BertModel"], "vocab_size": 500, "max_position_embeddings": 2048, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    flags = ["--max-num-seqs", "10", "--page-size", "16", "--bandwidth", "20g", "--dtype", "bfloat16"]
    assert main(["estimate", str(tmp_path / "config.json"), *flags]) == 0
    shown = capsys.readouterr().out
    # Keys and values of one layer, for pages of 2,048 tokens, one more for each request and one that is reserved.
    assert f"{(2048 / 16 + 10 + 1) * 16 * 2 * 64 * 2 / 1024:.1f} KiB" in shown
    assert "KV cache" not in shown
    assert "tokens/s" not in shown
    layer = 4 * 64 * 64 + 2 * 64 * 100 + (4 + 1 + 4) * 64 + 100
    cost = 2 * (3 * layer + 2 * 64)
    assert f"A token costs {cost / 1e6:,.3g} million operations" in shown
    assert f"a text of 2,048 tokens {3 * 4 * 64 * 2048 / 1e6:,.3g} million more" in shown


def test_a_token_of_an_encoder_costs_the_experts_that_it_is_sent_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_remote_encoder(tmp_path, "nomic_moe", n_layer=2)
    assert main(["estimate", str(folder), "--bandwidth", "20g"]) == 0
    size, inner, norms = 48, 80, 4 * 48
    attention, dense = 4 * size * size + 4 * size, 2 * size * inner + inner + size
    experts = 2 * 2 * size * inner + 8 * size + size
    cost = 2 * (2 * (attention + norms) + dense + experts + 2 * size)
    assert f"A token costs {cost / 1e6:,.3g} million operations" in capsys.readouterr().out
