import asyncio
import json

import msgspec
import pytest

from tests.serving.server.test_app import make_context
from tokenmill.core.messages import GenerateText, PromptProgress, TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.frontend.generation import Generation
from tokenmill.serving.server.anthropic.events import MessageWriter
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.generation.reply import GenerationReply
from tokenmill.serving.server.generation.timings import StreamTimer
from tokenmill.serving.server.generation.writer import ReplyWriter, UsageCounter
from tokenmill.serving.server.openai.chat_choices import ChatChoices
from tokenmill.serving.server.openai.chunks import ChoiceWriter, ReplyHead

HEAD = ReplyHead("chatcmpl-1", "chat.completion.chunk", 1, "tiny", "fp")
PING = b": ping\n"
FIRST = TextOutput("a", "Hello", [5, 6], 100, 40)
LAST = TextOutput("a", "!", [7], 100, 40, FinishReason.STOP, scheduled_at=1.0)


def writer(**fields: bool) -> ChoiceWriter:
    return ChoiceWriter(HEAD, ChatChoices(), GenerationCall(params={}, stream=True, **fields))


def chunks(written: ChoiceWriter) -> list[dict]:
    usage = UsageCounter(1)
    events = b""
    for output in (FIRST, LAST):
        usage.add(0, output)
        events += written.events(0, output, usage)
    events += written.last_events(usage)
    return [json.loads(line[6:]) for line in events.decode().splitlines() if line.startswith("data: {")]


class Bodies:
    """Takes what a reply sends; `come` waits for a body."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[dict] = asyncio.Queue()

    async def send(self, message: dict) -> None:
        self.messages.put_nowait(message)

    async def come(self) -> bytes:
        while (message := await self.messages.get())["type"] == "http.response.start":
            assert message["status"] == 200
        return message["body"]


async def stream(written: ReplyWriter, seconds: float, play) -> None:
    """Let a reply stream what `play` delivers, with pings after so many seconds."""
    context = make_context()
    msgspec.structs.force_setattr(context, "sse_ping", seconds)
    call = GenerationCall(params={}, stream=True)
    reply = GenerationReply(context, call, [GenerateText(ids=["a"], params=SamplingParams())], written, "label")
    generation, bodies = Generation(["a"], lambda _: None), Bodies()
    sending = asyncio.ensure_future(reply._stream(generation, bodies.send, bodies.send))
    await play(generation, bodies)
    await sending


@pytest.mark.parametrize(
    ("written", "ping"),
    [(writer(), PING), (MessageWriter("msg_1", "tiny"), b'event: ping\ndata: {"type":"ping"}\n\n')],
)
def test_a_silent_stream_gets_pings_before_and_between_deltas(written: ReplyWriter, ping: bytes) -> None:
    async def play(generation: Generation, bodies: Bodies) -> None:
        assert [await bodies.come(), await bodies.come()] == [ping, ping]
        generation.deliver(FIRST)
        while (body := await bodies.come()) == ping:
            pass
        assert b"Hello" in body
        assert await bodies.come() == ping
        generation.deliver(LAST)

    asyncio.run(stream(written, 0.001, play))


def test_without_pings_nothing_is_sent_between_deltas() -> None:
    async def play(generation: Generation, bodies: Bodies) -> None:
        await asyncio.sleep(0.01)
        assert bodies.messages.empty(), "not even the headers"
        generation.deliver(LAST)

    asyncio.run(stream(writer(), 0, play))


def test_a_delta_that_shows_nothing_is_no_sign_of_life() -> None:
    async def play(generation: Generation, bodies: Bodies) -> None:
        generation.deliver(FIRST)
        assert b"Hello" in await bodies.come()
        held = asyncio.ensure_future(_hold(generation))
        assert await bodies.come() == PING
        held.cancel()
        generation.deliver(LAST)

    asyncio.run(stream(writer(), 0.001, play))


async def _hold(generation: Generation) -> None:
    """Deliver tokens without text, as while the call of a tool is held back."""
    while True:
        generation.deliver(TextOutput("a", "", [9], 100, 40))
        await asyncio.sleep(0)


def test_who_asks_for_nothing_gets_neither_progress_nor_timings() -> None:
    assert all(not {"prompt_progress", "timings"} & chunk.keys() for chunk in chunks(writer(include_usage=True)))


def test_progress_comes_with_the_first_chunk_and_timings_with_the_last() -> None:
    first, last, usage = chunks(writer(wants_progress=True, wants_timings=True, include_usage=True))
    progress = first["prompt_progress"]
    assert (progress["total"], progress["cache"], progress["processed"]) == (100, 40, 100)
    assert "timings" not in first
    assert "prompt_progress" not in last
    assert usage["choices"] == []
    for timings in (last["timings"], usage["timings"]):
        assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (40, 60, 3)


def test_timings_without_progress() -> None:
    first, last = chunks(writer(wants_timings=True))
    assert "prompt_progress" not in first
    assert last["timings"]["predicted_n"] == 3


def test_a_prompt_is_timed_from_when_the_engine_began() -> None:
    times = iter([0.0, 3.0, 4.0])
    timer, usage = StreamTimer(lambda: next(times)), UsageCounter(1)
    for output in (FIRST, LAST):
        usage.add(0, output)
        timer.note(output)
    timings = timer.timings(usage)
    assert (timings.prompt_n, timings.prompt_ms, timings.prompt_per_second) == (60, 2000.0, 30.0)
    assert (timings.predicted_n, timings.predicted_ms, timings.predicted_per_second) == (3, 1000.0, 3.0)
    assert timings.prompt_per_token_ms == pytest.approx(33.333)


def test_progress_comes_while_the_prompt_is_computed_in_chunks_without_choices() -> None:
    written = writer(wants_progress=True, wants_timings=True, include_usage=True)
    told = TextOutput("a", "", [], 100, 40, progress=PromptProgress(100, 40, 60, 1.5))
    (line,) = written.events(0, told, UsageCounter(1)).decode().split("\n\n")[:1]
    chunk = json.loads(line[6:])
    assert (chunk["choices"], chunk["usage"]) == ([], None)
    progress = chunk["prompt_progress"]
    assert (progress["total"], progress["cache"], progress["processed"], progress["left_ms"]) == (100, 40, 60, 1500.0)
    first, *_ = chunks(written)
    assert (first["prompt_progress"]["processed"], first["prompt_progress"]["left_ms"]) == (100, 0.0)


def test_a_stream_sends_the_headers_with_the_first_progress() -> None:
    async def play(generation: Generation, bodies: Bodies) -> None:
        generation.deliver(TextOutput("a", "", [], 100, 40, progress=PromptProgress(100, 40, 60)))
        assert b'"prompt_progress":{"total":100' in await bodies.come()
        generation.deliver(LAST)
        assert b"!" in await bodies.come()

    asyncio.run(stream(writer(wants_progress=True, wants_timings=True), 0, play))
