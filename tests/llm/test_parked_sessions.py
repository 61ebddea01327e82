"""Idle sessions whose memory others need: with a disk tier their pages come back, and every token is as without."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.eventually import eventually
from tests.seeding import seed_for
from tokenmill import LLM, SamplingParams
from tokenmill.core.engine_messages import EngineStats

SEED = seed_for(__name__)
PARAMS = SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)
NUM_SESSIONS, NUM_TURNS, TURN_TOKENS = 4, 3, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", seed=SEED)


def talk(folder: Path, num_pages: int, **flags: object) -> tuple[list[list[int]], EngineStats]:
    """Sessions that take turns, in memory that holds two of them at most."""
    generator = random.Random(SEED)
    said = []
    with LLM(folder, dtype="bfloat16", num_pages=num_pages, max_num_seqs=2, max_model_len=160, **flags) as llm:
        sessions = [llm.session() for _ in range(NUM_SESSIONS)]
        for _ in range(NUM_TURNS):
            for session in sessions:
                turn = [generator.randrange(300) for _ in range(TURN_TOKENS)]
                said.append(session.send(turn, PARAMS).token_ids)
        for session in sessions:
            session.close()
        return said, llm.stats()


def test_parked_sessions_go_on_as_if_they_had_never_lost_a_page(folder: Path, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    undisturbed, _ = talk(folder, 120)
    lost, without = talk(folder, 12)
    parked, with_disk = talk(folder, 12, kv_disk=str(tmp_path), kv_disk_size=64 << 20)
    assert parked == lost == undisturbed
    assert without.num_preemptions > 0
    assert with_disk.num_loaded_tokens > 0
    assert run_tokens(with_disk) < run_tokens(without), "what was parked is not run again"


def test_an_engine_finds_what_another_one_has_stored_meanwhile(folder: Path, tmp_path: Path) -> None:
    prompt = random.Random(SEED).choices(range(300), k=80)
    flags = {"num_pages": 24, "kv_disk": str(tmp_path), "kv_disk_size": 64 << 20, "dtype": "bfloat16"}
    with LLM(folder, max_num_seqs=2, **flags) as first, LLM(folder, max_num_seqs=2, **flags) as second:
        (written,) = first.generate([prompt], PARAMS, use_tqdm=False)
        first.generate([[1, 2]], PARAMS, use_tqdm=False)  # its plans order what the ended one had to be stored
        index = next(tmp_path.glob("*-0.index"))
        record = 28 + 4 * 16
        eventually(lambda: len(index.read_bytes().partition(b"\n")[2]) >= 5 * record)
        (read,) = second.generate([prompt], PARAMS, use_tqdm=False)
        assert read.outputs[0].token_ids == written.outputs[0].token_ids
        assert read.num_cached_tokens == second.stats().num_loaded_tokens == 64


def test_a_reset_leaves_the_disk_unless_it_is_told_otherwise(folder: Path, tmp_path: Path) -> None:
    prompt = random.Random(SEED).choices(range(300), k=80)
    flags = {"num_pages": 24, "kv_disk": str(tmp_path), "kv_disk_size": 64 << 20}
    with LLM(folder, dtype="bfloat16", max_num_seqs=2, max_model_len=160, **flags) as llm:
        llm.generate([prompt], PARAMS, use_tqdm=False)
    # What the first one had stored when it was closed.
    with LLM(folder, dtype="bfloat16", max_num_seqs=2, max_model_len=160, **flags) as llm:
        cached = []
        for connector in (False, False, True, False):
            cached.append(llm.generate([prompt], PARAMS, use_tqdm=False)[0].num_cached_tokens)
            assert llm.reset_prefix_cache(reset_connector=connector)
    assert cached == [64, 64, 64, 0]


def run_tokens(stats: EngineStats) -> float:
    """Tokens that all steps have run."""
    assert stats.step_tokens is not None
    return stats.step_tokens.total


def test_memory_of_either_order_finds_what_the_other_has_stored(folder: Path, tmp_path: Path) -> None:
    prompt = random.Random(SEED).choices(range(300), k=80)
    flags = {
        "num_pages": 24,
        "max_num_seqs": 2,
        "kv_disk": str(tmp_path),
        "kv_disk_size": 64 << 20,
    }
    told = []
    for kv_layout in ("page-first", "layer-first", "page-first"):
        with LLM(folder, dtype="bfloat16", max_model_len=160, kv_layout=kv_layout, **flags) as llm:
            told.append(llm.generate([prompt], PARAMS, use_tqdm=False)[0])
    assert [output.num_cached_tokens for output in told] == [0, 64, 64]
    assert told[0].outputs == told[1].outputs == told[2].outputs


def test_pages_of_one_token_are_shared_to_the_last_but_one(folder: Path) -> None:
    prompt = random.Random(SEED).choices(range(300), k=45)
    told = []
    for page_size in (16, 1):
        with LLM(
            folder, dtype="bfloat16", page_size=page_size, num_pages=400, max_num_seqs=2, max_model_len=160
        ) as llm:
            told += [llm.generate([prompt], PARAMS, use_tqdm=False)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in told] == [0, 32, 0, 44]
    assert all(output.outputs[0].token_ids == told[0].outputs[0].token_ids for output in told)
