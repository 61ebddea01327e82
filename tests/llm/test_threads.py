"""Threads that share one `LLM`, and streams that are read in turn: everybody gets all of what is theirs."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.checkpoints import make_checkpoint
from tests.seeding import seed_for
from tokenmill import LLM, SamplingParams
from tokenmill.core.messages import TextOutput
from tokenmill.llm.turns import Turns

SEED = seed_for(__name__)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(make_checkpoint(tmp_path_factory.mktemp("threads")), max_num_seqs=6) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left(llm: LLM) -> Iterator[None]:
    print(f"seed {SEED}")
    yield
    assert llm.stats().num_rows_used == 0


def prompt_of(rng: random.Random) -> list[int]:
    return [rng.randrange(256) for _ in range(rng.randint(1, 30))]


def params_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=rng.randint(1, 25), seed=rng.randrange(1000), ignore_eos=True, logprobs=rng.choice([None, 2])
    )


def alone(llm: LLM, prompt: list[int], params: SamplingParams) -> tuple[str, list[int]]:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0].text, list(output.outputs[0].token_ids)


def whole(deltas: list[TextOutput]) -> tuple[str, list[int]]:
    return "".join(delta.text for delta in deltas), [token_id for delta in deltas for token_id in delta.token_ids]


def test_threads_get_the_texts_that_they_get_alone(llm: LLM) -> None:
    rng = random.Random(SEED)
    asked = [[(prompt_of(rng), params_of(rng)) for _ in range(rng.randint(1, 4))] for _ in range(24)]
    expected = [[alone(llm, *one) for one in batch] for batch in asked]

    def generate(batch: list[tuple[list[int], SamplingParams]]) -> list[tuple[str, list[int]]]:
        outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch], use_tqdm=False)
        for output, (_, params) in zip(outputs, batch, strict=True):
            assert output.finished
            assert len(output.outputs[0].logprobs or ()) == (params.max_tokens if params.logprobs else 0)
        return [(output.outputs[0].text, list(output.outputs[0].token_ids)) for output in outputs]

    def stream(batch: list[tuple[list[int], SamplingParams]]) -> list[tuple[str, list[int]]]:
        return [whole(list(llm.stream(prompt, params))) for prompt, params in batch]

    with ThreadPoolExecutor(4) as threads:
        for ask in (generate, stream):
            assert list(threads.map(ask, asked)) == expected


def test_threads_that_do_different_things_do_not_disturb_each_other(llm: LLM) -> None:
    rng = random.Random(SEED + 1)
    prompt, params = prompt_of(rng), params_of(rng)
    vector = llm.embed(prompt, use_tqdm=False)[0].outputs.embedding
    score = llm.score([*prompt, 1], use_tqdm=False)[0].outputs.score
    text = alone(llm, prompt, params)

    def send() -> list[int]:
        with llm.session() as session:
            return [len(session.send(prompt, SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) for _ in "ab"]

    def left_early() -> None:
        for delta in llm.stream(prompt, SamplingParams(max_tokens=200, ignore_eos=True)):
            assert delta.token_ids
            break

    jobs: list[tuple[Callable[[], object], object]] = [
        (lambda: alone(llm, prompt, params), text),
        (lambda: llm.embed(prompt, use_tqdm=False)[0].outputs.embedding, pytest.approx(vector, abs=1e-5)),
        (lambda: llm.score([*prompt, 1], use_tqdm=False)[0].outputs.score, pytest.approx(score, abs=1e-3)),
        (send, [4, 4]),
        (left_early, None),
        (lambda: llm.stats().num_rows_used >= 0, True),
    ]
    chosen = [rng.choice(jobs) for _ in range(60)]
    with ThreadPoolExecutor(5) as threads:
        found = list(threads.map(lambda job: job[0](), chosen))
    assert all(one == expected for one, (_, expected) in zip(found, chosen, strict=True))


def test_streams_that_are_read_in_turn_are_whole(llm: LLM) -> None:
    rng = random.Random(SEED + 2)
    asked = [(prompt_of(rng), params_of(rng)) for _ in range(5)]
    expected = [alone(llm, *one) for one in asked]
    streams = [llm.stream(*one) for one in asked]
    read: list[list[TextOutput]] = [[] for _ in streams]
    going_on = set(range(len(streams)))
    while going_on:
        index = rng.choice(sorted(going_on))
        delta = next(streams[index], None)
        if delta is None:
            going_on.remove(index)
        else:
            read[index].append(delta)
    assert [whole(deltas) for deltas in read] == expected


@pytest.mark.parametrize("between", ["generate", "embed", "score", "chat", "beams", "session", "step", "cache"])
def test_a_stream_is_whole_whatever_is_done_between_its_deltas(llm: LLM, between: str) -> None:
    from tokenmill import BeamSearchParams

    rng = random.Random(f"{SEED}{between}")
    prompt, params = prompt_of(rng), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    expected = alone(llm, prompt, params)
    session = llm.session()
    do: dict[str, Callable[[], object]] = {
        "generate": lambda: llm.generate([[1, 2], [3]], params, use_tqdm=False),
        "embed": lambda: llm.embed([4, 5], use_tqdm=False),
        "score": lambda: llm.score([4, 5], use_tqdm=False),
        "chat": lambda: llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False),
        "beams": lambda: llm.beam_search([[1, 2]], BeamSearchParams(beam_width=2, max_tokens=3)),
        "session": lambda: session.send([1, 2], params),
        "step": llm.step,
        "cache": lambda: llm.reset_prefix_cache(reset_running_requests=True),
    }
    read = []
    for delta in llm.stream(prompt, params):
        read.append(delta)
        if len(read) in (1, 3):
            do[between]()
    session.close()
    assert whole(read) == expected


def test_a_stream_that_is_collected_inside_a_step_is_aborted_after_it(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the collector does it, which may run anywhere."""
    streams = [llm.stream([1, 2], SamplingParams(max_tokens=400, ignore_eos=True))]
    next(streams[0])
    engine = llm._local.engine
    step = engine.step

    def step_and_collect() -> object:
        streams.clear()
        gc.collect()
        assert engine.scheduler.requests, "not inside the step"
        return step()

    monkeypatch.setattr(engine, "step", step_and_collect)
    llm.step()
    assert not engine.scheduler.requests


def test_turns_come_in_the_order_in_which_they_are_asked_for() -> None:
    turns, order, asked = Turns(), [], threading.Semaphore(0)

    def ask(number: int) -> None:
        asked.release()
        with turns, turns:
            order.append(number)

    threads = []
    with turns:
        for number in range(6):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            while len(turns._waiting) <= number:  # it has asked
                asked.acquire(timeout=0.01)
        assert order == []
    for thread in threads:
        thread.join(30)
    assert order == [0, 1, 2, 3, 4, 5]


def test_what_is_put_off_is_done_before_anybody_else_has_a_turn() -> None:
    turns, done = Turns(), []
    turns.do_between(lambda: done.append("at once"))
    with turns:
        turns.do_between(lambda: done.append("later"))
        assert done == ["at once"]
    assert done == ["at once", "later"]
