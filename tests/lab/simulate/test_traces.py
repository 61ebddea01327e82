"""Traces: small samples in the published shapes, read into arrivals."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests.engine.scheduler.harness import Harness
from tests.seeding import seed_for
from tokenmill.core.errors import TokenMillError
from tokenmill.lab.simulate.traces import TraceOptions, block_tokens, read_trace
from tokenmill.serving.observe.event_log import EventLog

SEED = seed_for(__name__)
OPTIONS = TraceOptions(vocab_size=1000)
HEAD = "46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57"
MOONCAKE = f"""\
{{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [{HEAD}, 58, 2353]}}
{{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [{HEAD}, 2366]}}
{{"timestamp": 27000, "input_length": 3, "output_length": 0, "hash_ids": [9], "tenant": "a", "priority": 2}}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_mooncake_prompts_share_what_their_hashes_share(tmp_path: Path) -> None:
    small, first, second = read_trace(written(tmp_path, MOONCAKE), OPTIONS)
    assert [one.seconds for one in (small, first, second)] == pytest.approx([0.0, 0.482, 3.535])
    assert [len(one.token_ids) for one in (small, first, second)] == [3, 6955, 6472]
    assert [one.num_output_tokens for one in (small, first, second)] == [1, 52, 26]
    assert (small.tenant, small.priority) == ("a", 2)
    assert first.tenant != second.tenant
    shared = 12 * 512
    assert (first.token_ids[:shared] == second.token_ids[:shared]).all()
    assert (first.token_ids[shared : shared + 16] != second.token_ids[shared : shared + 16]).any()


def test_lengths_blocks_and_times_are_scaled(tmp_path: Path) -> None:
    options = TraceOptions(vocab_size=1000, scale=1 / 16, speed=2.0, limit=2)
    arrivals = read_trace(written(tmp_path, MOONCAKE), options)
    assert [len(one.token_ids) for one in arrivals] == [1, 435]
    assert arrivals[1].seconds == pytest.approx(0.241)
    assert (arrivals[1].token_ids[:32] == block_tokens([46], 32, 32, 1000)).all()


def test_a_server_s_log_brings_its_requests_as_they_came(tmp_path: Path) -> None:
    lines: list[str] = []
    log = EventLog(lines.append, as_json=True)
    for seconds, prompt, output in ((2.0, 40, 8), (0.0, 9, 3), (1.0, 5, 0)):
        fields = {"prompt_tokens": prompt, "completion_tokens": output, "seconds": seconds, "outcome": "done"}
        log.note("request", "a request has ended", id="x", **fields)
        log.note("start", "something else")
    path = written(tmp_path, "\n".join([*lines, "a line of another kind", lines[0][:30]]))
    first, second = read_trace(path, TraceOptions(vocab_size=100))
    assert (len(first.token_ids), first.num_output_tokens) == (40, 8)
    assert (len(second.token_ids), second.num_output_tokens) == (9, 3)
    assert second.seconds - first.seconds == pytest.approx(2.0, abs=0.5)
    halved, _ = read_trace(path, TraceOptions(vocab_size=100, scale=0.5))
    assert (len(halved.token_ids), halved.num_output_tokens) == (20, 4)


def test_azure_prompts_share_nothing(tmp_path: Path) -> None:
    for text in (AZURE, "\ufeff" + AZURE.replace(".6805900", ".680590+00:00").replace(".9951690", ".995169+00:00")):
        first, second = read_trace(written(tmp_path, text), OPTIONS)
        assert (first.seconds, second.seconds) == (0.0, pytest.approx(4.314579, abs=1e-6))
        assert (len(first.token_ids), first.num_output_tokens) == (374, 44)
        assert (len(second.token_ids), second.num_output_tokens) == (396, 109)
        assert (first.token_ids[:16] != second.token_ids[:16]).any()


def test_blocks_have_equal_tokens_only_if_they_are_equal() -> None:
    source = random.Random(SEED)
    for vocab_size in (40, 151_936):
        numbers = list({source.choice([source.randrange(5000), source.randrange(1 << 61)]) for _ in range(2000)})
        prompts = np.stack([block_tokens([number], 16, 16, vocab_size) for number in numbers])
        assert len(np.unique(prompts, axis=0)) == len(numbers), f"seed {SEED}"
        assert prompts.min() >= 0
        assert prompts.max() < vocab_size


def test_a_step_log_brings_its_requests_with_as_many_tokens_as_they_got(tmp_path: Path) -> None:
    harness = Harness(num_pages=30, log=tmp_path / "trace")
    first = harness.add([1, 2, 3], max_tokens=7)
    harness.step()
    second = harness.add([4, 5], max_tokens=9)
    harness.drain()
    harness.engine.close()
    arrivals = read_trace(tmp_path / "trace", OPTIONS)
    assert [one.token_ids.tolist() for one in arrivals] == [[1, 2, 3], [4, 5]]
    assert [one.num_output_tokens for one in arrivals] == [len(harness.records[one].tokens) for one in (first, second)]
    assert arrivals[0].seconds == 0.0 < arrivals[1].seconds
    with pytest.raises(TokenMillError, match="cannot be scaled"):
        read_trace(tmp_path / "trace", TraceOptions(vocab_size=1000, scale=0.5))


def test_sessions_are_refused(tmp_path: Path) -> None:
    harness = Harness(num_pages=30, log=tmp_path / "trace")
    session = harness.open_session([1, 2], 3)
    harness.extend(session, [1], 2, is_last=True)
    harness.drain()
    harness.engine.close()
    with pytest.raises(TokenMillError, match=r"sessions of several turns: .*--step-model recorded"):
        read_trace(tmp_path / "trace", OPTIONS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"timestamp": 1, "input_length": 3}\n', "line 1: .*output_length"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1, "hash_ids": []}\n', "line 1: lengths"),
        (AZURE + "yesterday,1,2\n", "line 4: not TIMESTAMP"),
        ("TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,1\n", "line 2: not TIMESTAMP"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("hello", "is not a step log"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TokenMillError, match=message):
        read_trace(written(tmp_path, text), OPTIONS)


def test_a_trace_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenMillError, match="cannot read"):
        read_trace(tmp_path / "none", OPTIONS)
