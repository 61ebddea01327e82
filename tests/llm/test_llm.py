"""The offline `LLM`: calls that leave each other alone, whatever ends them."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig, InvalidRequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    with LLM(make_checkpoint(tmp_path_factory.mktemp("model")), dtype="float32", max_num_seqs=8) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> None:
    yield
    assert llm.stats().num_rows_used == 0
    assert llm.stats().num_pages_pinned == 0


def test_a_missing_tokenizer_is_noticed_before_the_weights_are_read(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InvalidCheckpoint, match=r"has no tokenizer\.json"):
        LLM(folder, dtype="float32")


def test_results_come_in_order_with_their_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    results = llm.generate(["one", [1, 2, 3], "three"], params, use_tqdm=False)
    assert [len(result.outputs[0].token_ids) for result in results] == [9, 2, 5]
    assert results[1].prompt_token_ids == [1, 2, 3]
    assert all(result.outputs[0].finish_reason == "length" for result in results)


def test_logprobs_stand_beside_their_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, ignore_eos=True)
    (result,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    output = result.outputs[0]
    assert [next(iter(at)) for at in output.logprobs] == output.token_ids
    assert all([one.rank for one in at.values()] == [1, 2, 3] for at in output.logprobs)


def test_n_answers_are_different_and_repeat_with_their_seed(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate([5, 6, 7], params, use_tqdm=False)[0] for _ in range(2))
    texts = [output.token_ids for output in first.outputs]
    assert texts == [output.token_ids for output in second.outputs]
    assert len({tuple(text) for text in texts}) == 3


def test_a_prompt_that_cannot_run_ends_the_call_and_nothing_else(llm: LLM) -> None:
    waiting = llm.submit([1, 2, 3], GREEDY)
    with pytest.raises(InvalidRequest, match="maximum context length"):
        llm.generate([[1, 2], [3] * 1000], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="2 prompts, but 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    while not waiting.finished:
        llm.step()
    assert len(waiting.outputs[0].token_ids) == 20


def test_calls_leave_what_others_submitted_alone(llm: LLM) -> None:
    alone = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    submitted = llm.submit([1, 2, 3], GREEDY)
    llm.generate([[4, 5]], SamplingParams(max_tokens=2), use_tqdm=False)
    ids = {delta.id for delta in llm.stream([6, 7], SamplingParams(max_tokens=3, ignore_eos=True))}
    assert len(ids) == 1, "a stream brings its own deltas only"
    while not submitted.finished:
        llm.step()
    assert submitted.outputs[0].token_ids == alone


def test_leaving_a_stream_early_aborts_its_request(llm: LLM) -> None:
    for _ in llm.stream([6, 7], SamplingParams(max_tokens=400, ignore_eos=True)):
        break
    assert llm.stats().num_running == 0


def stream_and_interrupt(llm: LLM, moment: int) -> None:
    for number, _ in enumerate(llm.stream([1, 2], SamplingParams(max_tokens=450, ignore_eos=True))):
        if number == moment:
            # Another thread sends it, so that it comes in the middle of whatever the engine does.
            threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGINT)).start()
    time.sleep(10)  # where the thread comes late, the signal falls here


@pytest.fixture
def interruptible() -> None:
    """A process started in the background ignores SIGINT, and tests may run in one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_falls_between_steps_and_the_engine_goes_on(llm: LLM) -> None:
    expected = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    for moment in range(3, 40, 9):
        with pytest.raises(KeyboardInterrupt):
            stream_and_interrupt(llm, moment)
        assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_an_extreme_parameter_is_refused_and_harms_no_neighbour(llm: LLM) -> None:
    for wrong in ({"min_tokens": 2**63 - 1}, {"top_k": 2**40}, {"temperature": 10**400}, {"max_tokens": 2**31}):
        with pytest.raises(InvalidRequest):
            SamplingParams(**wrong)


def test_an_option_that_does_not_exist_is_named() -> None:
    with pytest.raises(InvalidConfig, match="no option 'max_len'"):
        LLM("somewhere", max_len=3)


def test_a_size_may_be_a_text_and_another_text_is_refused_by_name(tmp_path: Path) -> None:
    options = {"kv_cache_memory_bytes": "1MiB", "max_model_len": "32", "dtype": "float32", "enforce_eager": "true"}
    with LLM(make_checkpoint(tmp_path / "model"), **options) as llm:
        assert llm.info.max_model_len == 32
    for name, wrong in (("kv_cache_memory_bytes", "much"), ("max_model_len", "3x"), ("enforce_eager", "perhaps")):
        with pytest.raises(InvalidConfig, match=f"LLM: {name}: '{wrong}' is not"):
            LLM("somewhere", **{name: wrong})


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="there is no folder"):
        LLM(tmp_path / "nothing")


def test_prompts_that_need_no_output_may_fill_the_context(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    with LLM(folder, dtype="float32", max_model_len=48, num_pages=4, page_size=16) as llm:
        whole, over = [5] * 48, [5] * 49
        for _ in range(2):  # also when the cache has it
            assert len(llm.embed([whole], use_tqdm=False, pooling="last")[0].prompt_token_ids) == 48
            assert llm.score([whole], use_tqdm=False)[0].outputs.score < 0
        for ask in (lambda: llm.embed([over]), lambda: llm.score([over]), lambda: llm.generate([whole])):
            with pytest.raises(InvalidRequest, match="maximum context length is 48"):
                ask()
        assert llm.stats().num_rows_used == 0


def test_half_a_character_is_a_replacement(llm: LLM) -> None:
    found, wanted = llm.generate(["cut \ud83d", "cut \ufffd"], GREEDY, use_tqdm=False)
    assert found.prompt_token_ids == wanted.prompt_token_ids


@pytest.mark.parametrize("given", [5, None, 1.5, {1}])
def test_what_is_no_prompt_is_said_in_a_sentence(llm: LLM, given: object) -> None:
    for call in (llm.generate, llm.chat, llm.embed, llm.score):
        with pytest.raises(InvalidRequest, match="a prompt is a text or a list"):
            call(given, use_tqdm=False)


def test_a_closed_engine_says_so(tmp_path: Path) -> None:
    closed = LLM(make_checkpoint(tmp_path / "model"), dtype="float32", max_num_seqs=2)
    closed.close()
    closed.close()
    for call in (lambda: closed.generate("a", use_tqdm=False), lambda: next(closed.stream("a")), closed.step):
        with pytest.raises(InvalidRequest, match="this LLM is closed"):
            call()
