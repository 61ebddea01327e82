"""`LLM.sleep` gives memory back, and `wake_up` takes it again: the same tokens, the same size."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidCheckpoint, InvalidRequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
MIB = 1 << 20


@pytest.fixture
def large(tmp_path):
    """KV of 64 MiB and weights of as much."""
    folder = make_checkpoint(tmp_path / "model", hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    with LLM(folder, dtype="float32", max_num_seqs=4, num_pages=8192) as engine:
        yield engine


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    with LLM(make_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32", max_num_seqs=4) as engine:
        yield engine


def kv_tensors(llm):
    return llm._local.engine.executor.runner._attention.kv.tensors


def weight_tensors(llm):
    """The tensors that the model's objects lead to."""
    waiting, seen, tensors = [llm._local._built.model.decoder], set(), {}
    while waiting:
        each = waiting.pop()
        if isinstance(each, torch.Tensor):
            tensors[each.data_ptr()] = each
        elif id(each) not in seen and (
            isinstance(each, dict | list | tuple) or type(each).__module__.startswith("tokenmill.")
        ):
            seen.add(id(each))
            waiting.extend(gc.get_referents(each))
    return list(tensors.values())


def weak(tensors):
    return [weakref.ref(tensor) for tensor in tensors]


def tokens(llm, params=GREEDY):
    return llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids


def test_the_deeper_sleep_gives_back_weights_and_kv(large):
    before = tokens(large)
    kv, weights = weak(kv_tensors(large)), weak(weight_tensors(large))
    assert sum(tensor().nbytes for tensor in kv) >= 0.9 * large.info.kv_bytes > 40 * MIB
    assert sum(tensor().nbytes for tensor in weights) >= 0.9 * large.info.weight_bytes > 40 * MIB
    size = large.info.num_pages, large.info.max_model_len
    large.sleep(level=2)
    assert not any(tensor() is not None for tensor in kv + weights)
    large.wake_up()
    assert (large.stats().num_pages, large.info.max_model_len) == size
    assert tokens(large) == before


def test_the_lighter_sleep_keeps_the_weights_of_a_cpu(large):
    before = tokens(large)
    decoder, kv = large._local._built.model.decoder, weak(kv_tensors(large))
    large.sleep()
    assert not any(tensor() is not None for tensor in kv)
    Path(large.info.model, "model.safetensors").unlink()
    large.wake_up(tags=["weights"])
    with pytest.raises(InvalidRequest, match="asleep"):
        tokens(large)
    large.wake_up(tags=["kv_cache"])
    assert large._local._built.model.decoder is decoder
    assert tokens(large) == before
    large.sleep(level=2)
    for _ in range(2):
        with pytest.raises(InvalidCheckpoint):
            large.wake_up()
        with pytest.raises(InvalidRequest, match="asleep"):
            large.stats()


def test_asleep_every_call_that_needs_the_engine_is_refused(small):
    params = SamplingParams(max_tokens=1)
    small.sleep()
    small.sleep(level=1)
    for call in (
        lambda: small.generate("x", params),
        lambda: small.chat([{"role": "user", "content": "x"}], params),
        lambda: next(small.stream("x", params)),
        lambda: small.session().send([1], params),
        lambda: small.embed("x"),
        lambda: small.score("x"),
        lambda: small.submit("x", params),
        small.step,
        small.stats,
        small.get_metrics,
        small.reset_prefix_cache,
    ):
        with pytest.raises(InvalidRequest, match=r"the engine is asleep: call wake_up\(\) first"):
            call()
    assert small.get_tokenizer().encode("a")
    small.wake_up()
    assert small._local._text.num_open == 0, "a refused request leaves nothing behind"
    assert len(small.generate(["x"], params, use_tqdm=False)) == 1


def test_it_does_not_fall_asleep_over_open_requests_and_sessions(small):
    waiting = small.submit([1, 2, 3], GREEDY)
    with pytest.raises(InvalidRequest, match="1 requests or sessions are open"):
        small.sleep()
    while not waiting.finished:
        small.step()
    with small.session() as session:
        session.send([1], GREEDY)
        with pytest.raises(InvalidRequest, match="open"):
            small.sleep()
    small.sleep()
    small.wake_up()


def test_draws_without_a_seed_go_on_after_it(small):
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0)
    first = tokens(small, params)
    small.sleep()
    small.wake_up()
    assert tokens(small, params) != first


def test_an_engine_with_a_step_log_stays_awake(tmp_path):
    folder = make_checkpoint(tmp_path / "model")
    llm = LLM(folder, dtype="float32", num_pages=64, step_log=str(tmp_path / "steps.jsonl"))
    with llm, pytest.raises(InvalidRequest, match="step_log"):
        llm.sleep()
