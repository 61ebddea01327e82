import json
import time
from pathlib import Path

import numpy as np
import pytest
from benchmarks.peers import quality, real_model
from benchmarks.peers.adapters.adapter import Setup, Texts, judge
from benchmarks.peers.peers import TOKENMILL, Peer

from tests.checkpoints import make_checkpoint
from tests.model.weights.gguf_writer import write_gguf
from tests.model.weights.test_gguf import logits
from tokenmill.config.configs import EngineConfig
from tokenmill.demo import demo_model_path
from tokenmill.lab.bench import quality as bench
from tokenmill.lab.bench.divergence import scored_positions
from tokenmill.llm.local import load_llm
from tokenmill.model.weights.hub import fetch


@pytest.mark.parametrize(
    ("family", "is_wide"), [("llama", False), ("llama", True), ("qwen3", False), ("gemma3", False)]
)
def test_channels_in_another_order_are_the_same_function(
    family: str, is_wide: bool, tmp_path: Path, rng: np.random.Generator
) -> None:
    shape = {"num_hidden_layers": 6, "layer_types": None, "query_pre_attn_scalar": 16} if family == "gemma3" else {}
    folder = make_checkpoint(tmp_path / "model", family, seed=int(rng.integers(2**31)), **shape)
    source = write_gguf(folder, family, None)
    (tmp_path / "other").mkdir()
    real_model.write(source, tmp_path / "other", is_wide)
    one, other = (fetch(str(path), None, str(tmp_path / "cache")) for path in (source, tmp_path / "other" / "F32.gguf"))
    assert json.loads((other / "config.json").read_text())["hidden_size"] % (256 if is_wide else 1) == 0
    sequence = rng.integers(0, 331, 40).tolist()
    want, got = logits(one, sequence, np.random.default_rng(1)), logits(other, sequence, np.random.default_rng(1))
    assert not np.array_equal(want, got), "sums in another order"
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max()))


def test_logits_that_are_asked_for_are_written_chunk_by_chunk(tmp_path: Path) -> None:
    class Engine:
        def prepare(self, batch_size: int, context_len: int) -> None:
            assert (batch_size, context_len) == (1, 4)

        def logits(self, chunk: list[int]) -> np.ndarray:
            return np.array([[token, -token] for token in chunk], np.float32)

    judge(Engine(), Texts([[1, 2, 3, 4], [5, 6, 7, 8]], 1, 3, str(tmp_path / "logits")))
    written = np.fromfile(tmp_path / "logits", np.float32)
    assert written.reshape(-1, 2)[:, 0].tolist() == [2, 3, 6, 7]


def test_a_task_with_texts_survives_its_file(tmp_path: Path) -> None:
    setup = Setup("model", "int8", 1, 1, 0, time.monotonic(), (), "outcome", Texts([[1, 2]], 0, 1, "logits"))
    setup.write(tmp_path / "setup")
    assert Setup.read(str(tmp_path / "setup")) == setup


@pytest.mark.processes
def test_figures_are_those_of_bench_quality(tmp_path: Path) -> None:
    base, text = EngineConfig(model=str(demo_model_path()), max_num_seqs=1), bench.BUNDLED.read_text()
    want = bench.measure(base, text, ["int8"], context=64, most_chunks=2)["rows"][1]
    with load_llm(base) as llm:
        chunks = bench.cut(llm, text, 64, 2)
    positions = scored_positions(64)
    texts = Texts(chunks, positions.start, positions.stop, str(tmp_path / "logits"))
    peer = Peer(
        TOKENMILL, "", "tokenmill_peer", {"int8": "int8"}, lambda _: demo_model_path(), lambda *_: demo_model_path()
    )
    reference = quality.judge_format(peer, "demo", "float32", texts, 1)
    found = quality.judge_format(peer, "demo", "int8", texts, 1, reference)
    for name in ("ppl", "ppl_ratio", "kl_mean", "kl_p99", "same_top"):
        assert found[name] == pytest.approx(want[name], rel=1e-5), name
