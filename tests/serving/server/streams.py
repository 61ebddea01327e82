"""Streams of every kind that keeps something besides its tokens, and all that a client hears of each."""

import asyncio
import random

import httpx
import openai

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 9},
    },
    "required": ["name", "sizes"],
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "grind", "parameters": SCHEMA}}
LONG_WORDS = 60
MAX_TOKENS = 80
# Draws, penalties, several answers, probabilities, text held back, grammars, calls, a long prompt, a conversation.
KINDS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "n": 2},
    {"temperature": 0.7, "logprobs": True, "top_logprobs": 3},
    {"temperature": 1.0, "stop": ["e", "qu"], "extra_body": {"min_tokens": 60}},
    {"temperature": 1.0, "response_format": FORMAT},
    {"temperature": 1.0, "tools": [TOOL], "tool_choice": "required"},
    {"temperature": 1.0, "words": LONG_WORDS},
    {"temperature": 1.0, "turns": 2},
]


async def answers(url: str, count: int) -> list[tuple]:
    """Return the clients' answers of this many streams at once."""
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(limits=limits, timeout=300) as http,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=http) as client,
    ):
        return await asyncio.gather(*(answer(client, number) for number in range(count)))


async def answer(client: openai.AsyncOpenAI, number: int) -> tuple:
    """Return a client's answer of one stream, whose number says of which kind it is."""
    kind = {"seed": number, **KINDS[number % len(KINDS)]}
    question = f"{number} " + " ".join(
        random.Random(number).choices(["tell", "me", "of", "mills"], k=kind.pop("words", 6))
    )
    if turns := kind.pop("turns", 0):
        return await conversation(client, question, turns, kind)
    return await chat(client, question, kind)


async def chat(client: openai.AsyncOpenAI, question: str, kind: dict) -> tuple:
    """Texts, calls, ends, log probabilities and usage, joined from the chunks."""
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        **kind,
    )
    texts, calls, ends, logprobs, usages = {}, {}, {}, {}, []
    async for chunk in stream:
        usages += [(chunk.usage.prompt_tokens, chunk.usage.completion_tokens)] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            for call in choice.delta.tool_calls or ():
                name, arguments = calls.get((choice.index, call.index), ("", ""))
                calls[choice.index, call.index] = (
                    name + (call.function.name or ""),
                    arguments + (call.function.arguments or ""),
                )
            if choice.logprobs is not None:
                logprobs.setdefault(choice.index, []).extend(repr(one) for one in choice.logprobs.content or ())
            if choice.finish_reason is not None:
                assert choice.index not in ends, "one end each"
                ends[choice.index] = choice.finish_reason
    assert len(usages) == 1
    return texts, calls, ends, logprobs, usages


async def conversation(client: openai.AsyncOpenAI, question: str, turns: int, kind: dict) -> tuple:
    """The texts of turns that each go on with the one before, and their usage."""
    heard, earlier, seed = [], openai.NOT_GIVEN, kind.pop("seed")
    for _ in range(turns):
        stream = await client.responses.create(
            model="tiny",
            input=question,
            max_output_tokens=MAX_TOKENS // 2,
            previous_response_id=earlier,
            stream=True,
            extra_body={"seed": seed},
            **kind,
        )
        text, ends = "", []
        async for event in stream:
            if event.type == "response.output_text.delta":
                text += event.delta
            elif event.type in ("response.completed", "response.incomplete"):
                ends.append(event.response)
        (end,) = ends
        assert end.output_text == text
        heard.append((text, end.status, end.usage.input_tokens, end.usage.output_tokens))
        earlier = end.id
    return tuple(heard)
