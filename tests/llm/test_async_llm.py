"""`AsyncLLM`: many tasks on one engine; each gets its own text, and leaves nothing behind however it ends."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.seeding import seed_for
from tokenmill import LLM, AsyncLLM, SamplingParams
from tokenmill.core.errors import InvalidRequest, TokenMillError
from tokenmill.core.request import FinishReason
from tokenmill.llm.outputs import RequestOutput

SEED = seed_for(__name__)
LONG = SamplingParams(max_tokens=300, ignore_eos=True)
DEADLINE = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("async"))


def with_llm(model: Path, work: Callable[[AsyncLLM], Awaitable[None]], **options: Any) -> None:
    """Run `work`; afterwards nothing is open."""

    async def run() -> None:
        async with AsyncLLM(model, max_num_seqs=6, **options) as llm:
            async with asyncio.timeout(DEADLINE):
                await work(llm)
                while (await llm.stats()).num_rows_used:  # an abort is on its way
                    await asyncio.sleep(0)

    print(f"seed {SEED}")
    asyncio.run(run())


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


def test_tasks_get_the_texts_of_llm(model: Path) -> None:
    rng = random.Random(SEED)
    asked = [
        ([rng.randrange(256) for _ in range(rng.randint(1, 20))], SamplingParams(max_tokens=rng.randint(1, 20), seed=i))
        for i in range(20)
    ]
    with LLM(model) as llm:
        expected = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)

    async def work(llm: AsyncLLM) -> None:
        found = await asyncio.gather(*[last(llm.generate(*one, f"r{i}")) for i, one in enumerate(asked)])
        assert [one.request_id for one in found] == [f"r{i}" for i in range(len(asked))]
        for one, wanted in zip(found, expected, strict=True):
            assert one.finished
            assert one.prompt_token_ids == wanted.prompt_token_ids
            assert one.outputs[0].text == wanted.outputs[0].text
            assert one.outputs[0].token_ids == wanted.outputs[0].token_ids
            assert one.outputs[0].finish_reason == wanted.outputs[0].finish_reason

    with_llm(model, work)


def test_outputs_grow_and_do_not_change_afterwards(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        params = SamplingParams(n=2, max_tokens=9, seed=1, ignore_eos=True, logprobs=1)
        outputs = [output async for output in llm.generate("grow", params)]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].num_output_tokens == 18
        for before, after in itertools.pairwise(outputs):
            assert 0 < before.num_output_tokens < after.num_output_tokens
            for one, other in zip(before.outputs, after.outputs, strict=True):
                assert other.text.startswith(one.text)
                assert len(one.logprobs or ()) == len(one.token_ids)

    with_llm(model, work)


@pytest.mark.parametrize("how", ["close", "cancel", "break", "abort", "before it begins"])
def test_a_request_ends_with_its_reader(model: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM) -> None:
        other = asyncio.ensure_future(last(llm.generate([5, 6], SamplingParams(max_tokens=40, ignore_eos=True))))
        outputs = llm.generate([1, 2, 3], LONG, "one")
        if how == "before it begins":
            task = asyncio.ensure_future(last(outputs))
            await asyncio.sleep(0)
            task.cancel()
            assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        else:
            await anext(outputs)
        if how == "close":
            await outputs.aclose()  # type: ignore[attr-defined]
        elif how == "cancel":
            task = asyncio.ensure_future(last(outputs))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif how == "break":
            async for _ in outputs:
                break
            del outputs
        elif how == "abort":
            with monkeypatch.context() as patch:
                patch.setattr(llm._llm, "step", list)  # it gets no further
                await llm.abort(["one", "unknown"])
                found = await last(outputs)
            assert found.outputs[0].finish_reason is FinishReason.ABORT
            assert found.num_output_tokens < 300
        assert (await other).num_output_tokens == 40

    with_llm(model, work)


def test_a_refusal_ends_only_its_own_request(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM) -> None:
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        going_on = asyncio.ensure_future(last(llm.generate([1, 2], params, "a")))
        await asyncio.sleep(0)
        for prompt in ([10**6], [], {"nothing": 1}):
            with pytest.raises(InvalidRequest):
                await last(llm.generate(prompt, LONG))  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(llm._llm, "step", list)  # it gets no further
            first = asyncio.ensure_future(last(llm.generate([1], params, "b")))
            await asyncio.sleep(0)
            with pytest.raises(InvalidRequest, match="runs already"):
                await last(llm.generate([1], LONG, "b"))
        await first
        assert (await going_on).num_output_tokens == 30

    with_llm(model, work)


def test_chats_vectors_and_sleep(model: Path) -> None:
    async def work(llm: AsyncLLM) -> None:
        messages = [{"role": "user", "content": "hi"}]
        found = await last(llm.generate(messages, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)))
        assert (found.prompt or "").endswith("<|im_start|>assistant\n")
        assert len((await llm.embed([1, 2, 3])).outputs.embedding) == 32
        assert (await llm.get_tokenizer()).encode("a")
        assert await llm.reset_prefix_cache()
        await llm.sleep(2)
        with pytest.raises(InvalidRequest, match="asleep"):
            await last(llm.generate([1], LONG))
        await llm.wake_up()
        assert (await last(llm.generate([1], SamplingParams(max_tokens=2, ignore_eos=True)))).num_output_tokens == 2

    with_llm(model, work)


def test_everybody_is_told_when_the_engine_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM) -> None:
        readers = [asyncio.ensure_future(last(llm.generate([i], LONG))) for i in (1, 2)]

        def fail() -> None:
            raise TokenMillError("no device")

        with monkeypatch.context() as patch:
            patch.setattr(llm._llm, "step", fail)
            for outcome in await asyncio.gather(*readers, return_exceptions=True):
                assert isinstance(outcome, TokenMillError) and "no device" in str(outcome)

    with_llm(model, work)


def test_shutdown_ends_what_runs(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        llm = AsyncLLM(model)
        outputs = llm.generate([1, 2], LONG)
        await anext(outputs)
        monkeypatch.setattr(llm._llm, "step", list)  # it gets no further
        llm.shutdown()
        async with asyncio.timeout(DEADLINE):
            assert (await last(outputs)).outputs[0].finish_reason is FinishReason.ABORT

    asyncio.run(run())
