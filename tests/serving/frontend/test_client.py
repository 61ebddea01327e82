import asyncio
import random

import pytest

from tests.serving.frontend.test_text_processor import ready
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import EngineDead, InvalidRequest, Unavailable
from tokenmill.core.messages import (
    AbortRequests,
    GenerateText,
    PromptProgress,
    RequestRejected,
    TextOutput,
    TextOutputs,
)
from tokenmill.core.plan import Logprob, TokenLogprobs
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.text_queries import Decoded, DecodeTokens, Encoded, EncodeText
from tokenmill.serving.frontend.client import EngineClient
from tokenmill.serving.frontend.generation import merge


class Workers:
    """Collects what a client sends, by worker."""

    def __init__(self, num_workers=1):
        self.sent = [[] for _ in range(num_workers)]

    def client(self, observer=None) -> EngineClient:
        return EngineClient([sent.append for sent in self.sent], observer)


class Observer:
    def __init__(self):
        self.seen = []

    def first_token(self, seconds):
        self.seen.append("first")

    def next_tokens(self, num_tokens, seconds):
        self.seen.append(num_tokens)

    def finished(self, request):
        self.seen.append((request.reason, request.num_prompt_tokens, request.num_output_tokens))


def prompt(n=1, **fields):
    return GenerateText(ids=[], params=SamplingParams(n=n), text="hi", **fields)


def delta(request_id, text, finish=None, **fields):
    return TextOutput(request_id, text, [1], 5, 0, finish, **fields)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def test_deltas_reach_their_reader_with_their_index():
    async def scenario():
        workers = Workers()
        client = workers.client()
        async with client.generate([prompt(n=2), prompt()]) as generation:
            ids = [request_id for message in workers.sent[0] for request_id in message.ids]
            assert len(set(ids)) == 3
            client.dispatch(TextOutputs([delta(ids[2], "c", FinishReason.STOP), delta(ids[0], "a")]))
            client.dispatch(
                TextOutputs([delta(ids[0], "A", FinishReason.LENGTH), delta(ids[1], "b", FinishReason.STOP)])
            )
            got = [(index, output.text) async for index, output in generation]
        assert sorted(got) == [(0, "aA"), (1, "b"), (2, "c")]
        assert workers.sent[0][2:] == [], "nothing is left to abort"
        assert client.num_open == 0

    run(scenario())


def test_leaving_early_aborts_what_is_open_at_the_same_worker():
    async def scenario():
        workers = Workers(2)
        client = workers.client()
        for worker in (0, 1, 0):
            workers.sent[worker].clear()
            async with client.generate([prompt(n=2)]) as generation:
                (message,) = workers.sent[worker]
                client.dispatch(TextOutputs([delta(message.ids[0], "x", FinishReason.STOP)]))
                assert (await anext(generation))[1].text == "x"
            assert workers.sent[worker][1] == AbortRequests([message.ids[1]])
            client.dispatch(TextOutputs([delta(message.ids[1], "late", FinishReason.STOP)]))
        assert client.num_open == 0

    run(scenario())


def test_a_cancelled_reader_aborts():
    async def scenario():
        workers = Workers()
        client = workers.client()

        async def read():
            async with client.generate([prompt()]) as generation:
                async for _ in generation:
                    pass

        task = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert [type(message) for message in workers.sent[0]] == [GenerateText, AbortRequests]

    run(scenario())


def test_a_slow_reader_gets_merged_deltas_and_little_is_kept():
    async def scenario():
        workers = Workers()
        client = workers.client()
        async with client.generate([prompt()]) as generation:
            (request_id,) = workers.sent[0][0].ids
            for i in range(1000):
                client.dispatch(TextOutputs([delta(request_id, str(i % 10))]))
                assert len(generation._waiting[request_id]) <= 64
            client.dispatch(TextOutputs([delta(request_id, "!", FinishReason.LENGTH)]))
            outputs = [output async for _, output in generation]
        assert len(outputs) == 1
        assert outputs[0].text == "0123456789" * 100 + "!"
        assert len(outputs[0].token_ids) == 1001

    run(scenario())


def test_merging_keeps_logprobs_with_their_tokens():
    def with_logprobs(token_id, finish=None):
        logprobs = [TokenLogprobs(Logprob(token_id, -1.0, 1), [])]
        return delta("r", "x", finish, logprobs=logprobs, token_bytes={token_id: bytes([token_id])})

    merged = merge([with_logprobs(1), with_logprobs(2), with_logprobs(3, FinishReason.STOP)])
    assert [position.sampled.token_id for position in merged.logprobs] == [1, 2, 3]
    assert merged.token_bytes == {1: b"\1", 2: b"\2", 3: b"\3"}
    assert merged.finish_reason is FinishReason.STOP


def test_merging_loses_no_token_to_the_progress_of_its_prompt():
    progress = TextOutput("r", "", [], 9, 0, progress=PromptProgress(9, 0, 9, None))
    for parts in ([progress, delta("r", "x")], [delta("r", "x"), progress], [progress, delta("r", "x"), progress]):
        merged = merge(parts)
        assert (merged.text, len(merged.token_ids), merged.progress) == ("x", 1, None)
    assert merge([progress, progress]).progress == progress.progress


def test_a_rejection_refuses_the_call_and_aborts_its_other_prompts():
    async def scenario():
        workers = Workers()
        client = workers.client()
        async with client.generate([prompt(), prompt()]) as generation:
            first, second = (message.ids for message in workers.sent[0])
            client.dispatch(RequestRejected(ids=second, status=400, error="too long", param="prompt"))
            with pytest.raises(InvalidRequest, match="too long") as caught:
                await anext(generation)
        assert (caught.value.status, caught.value.param) == (400, "prompt")
        assert workers.sent[0][-1] == AbortRequests(first)
        assert client.num_open == 0

    run(scenario())


def test_what_may_pass_is_unavailable_and_no_fault_of_the_request():
    async def scenario():
        workers = Workers()
        client = workers.client()
        async with client.generate([prompt()]) as generation:
            client.dispatch(RequestRejected(ids=workers.sent[0][0].ids, status=503, error="try again"))
            with pytest.raises(Unavailable, match="try again") as caught:
                await anext(generation)
        assert (caught.value.status, caught.value.retry_after) == (503, 1)

    run(scenario())


def test_when_the_engine_dies_everybody_is_told():
    async def scenario():
        workers = Workers()
        client = workers.client()
        call = asyncio.ensure_future(client.encode(EncodeText(id="", text="a")))
        async with client.generate([prompt()]) as generation:
            await asyncio.sleep(0)
            client.fail(EngineDead("gone"))
            with pytest.raises(EngineDead):
                await anext(generation)
        with pytest.raises(EngineDead):
            await call
        with pytest.raises(EngineDead):
            client.generate([prompt()])
        assert not any(isinstance(message, AbortRequests) for message in workers.sent[0])

    run(scenario())


def test_start_returns_when_every_worker_has_answered():
    async def scenario():
        workers = Workers(3)
        client = workers.client()
        starting = asyncio.ensure_future(client.start(ready(), 4))
        await asyncio.sleep(0.01)
        for sent in workers.sent:
            assert [type(message) for message in sent] == [EngineReady, DecodeTokens]
            assert not starting.done()
            client.dispatch(Decoded(sent[1].id, ""))
        await starting

    run(scenario())


def test_calls_without_generation_are_answered_or_refused():
    async def scenario():
        workers = Workers()
        client = workers.client()
        encoding = asyncio.ensure_future(client.encode(EncodeText(id="", text="a")))
        decoding = asyncio.ensure_future(client.decode([99]))
        await asyncio.sleep(0)
        encode, decode = workers.sent[0]
        client.dispatch(Encoded(encode.id, [1], ["a"]))
        client.dispatch(RequestRejected(ids=[decode.id], status=400, error="no such token"))
        assert (await encoding).token_ids == [1]
        with pytest.raises(InvalidRequest, match="no such token"):
            await decoding

    run(scenario())


def test_what_msgpack_cannot_hold_is_refused_and_nothing_stays_open():
    def send(message):
        if isinstance(message, GenerateText) and message.text == "bad":
            raise OverflowError

    async def scenario():
        sent = []
        client = EngineClient([lambda message: (sent.append(message), send(message))])
        bad = GenerateText(ids=[], params=SamplingParams(), text="bad")
        with pytest.raises(InvalidRequest, match="cannot be represented"):
            client.generate([prompt(), bad])
        assert client.num_open == 0
        assert sent[-1] == AbortRequests([*sent[0].ids, *sent[1].ids])

    run(scenario())


def test_the_observer_sees_each_request_begin_go_on_and_end_once():
    async def scenario():
        workers, observer = Workers(), Observer()
        client = workers.client(observer)
        async with client.generate([prompt(n=2)]) as generation:
            a, b = workers.sent[0][0].ids
            client.dispatch(TextOutputs([delta(a, "x"), delta(a, "y"), delta(a, "z", FinishReason.STOP)]))
            await anext(generation)
        assert observer.seen == ["first", 1, 1, (FinishReason.STOP, 5, 3), (FinishReason.ABORT, 0, 0)]
        client.dispatch(TextOutputs([delta(b, "late")]))
        assert len(observer.seen) == 5

    run(scenario())


def test_random_traffic_leaves_nothing_open():
    seed = random.randrange(2**32)
    rng = random.Random(seed)

    async def read(client, leave_after):
        async with client.generate([prompt(n=rng.randrange(1, 4))]) as generation:
            async for _ in generation:
                leave_after -= 1
                if leave_after == 0:
                    return

    async def scenario():
        workers = Workers(2)
        client = workers.client()
        readers = [asyncio.ensure_future(read(client, rng.randrange(1, 10))) for _ in range(30)]
        while not all(reader.done() for reader in readers):
            ids = list(client._open)
            outputs = [
                delta(i, "x", rng.choice([None, None, FinishReason.STOP])) for i in rng.sample(ids, len(ids) // 2)
            ]
            client.dispatch(TextOutputs(outputs))
            await asyncio.sleep(0)
            if len(ids) == 1:
                client.dispatch(TextOutputs([delta(ids[0], "x", FinishReason.STOP)]))
        assert client.num_open == 0, f"seed {seed}"
        aborted = [i for sent in workers.sent for m in sent if isinstance(m, AbortRequests) for i in m.ids]
        assert len(aborted) == len(set(aborted)), f"seed {seed}"

    run(scenario())


def test_an_avoided_worker_gets_no_call_and_without_another_calls_are_refused():
    async def scenario():
        workers = Workers(3)
        client = workers.client()
        client.avoid(1, True)
        for _ in range(4):
            client.generate([prompt()])
        assert [len(sent) for sent in workers.sent] == [2, 0, 2]
        client.avoid(1, False)
        for _ in range(3):
            client.generate([prompt()])
        assert [len(sent) for sent in workers.sent] == [3, 1, 3]
        for worker in range(3):
            client.avoid(worker, True)
        with pytest.raises(EngineDead, match="no text worker answers"):
            client.generate([prompt()])
        with pytest.raises(EngineDead, match="no text worker answers"):
            await client.encode(EncodeText(id="", text="hi"))

    run(scenario())


def test_what_a_lost_worker_has_ends_with_an_error_and_nothing_else_does():
    async def scenario():
        workers = Workers(2)
        client = workers.client()
        lost, kept = client.generate([prompt(n=2)]), client.generate([prompt()])
        call = asyncio.ensure_future(client.decode([1]))
        await asyncio.sleep(0)
        client.lose(0, EngineDead("gone"))
        client.lose(0, EngineDead("gone"))
        ids = workers.sent[0][0].ids
        assert workers.sent[0][2:] == [AbortRequests(ids)], "told once, for when it wakes"
        for waiting in (anext(lost), call):
            with pytest.raises(EngineDead, match="gone"):
                await waiting
        assert client.num_open == 1
        client.dispatch(TextOutputs([delta(ids[0], "late"), delta(workers.sent[1][0].ids[0], "a")]))
        assert (await anext(kept))[1].text == "a"

    run(scenario())
