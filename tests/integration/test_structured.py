"""Structured output from a running server: right answers for those who ask, no difference for those who do not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.integration.serving import MODEL_NAME, complete, open_client
from tests.serving.server.running_server import RunningServer

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "b"]},
        "sizes": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}
# Refused at once, after a while, or at the first token.
HOSTILE: list[dict[str, Any]] = [
    {"structured_outputs": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}},
    {"structured_outputs": {"json": {"type": "integer", "multipleOf": 999_983}}},
    {"structured_outputs": {"json": {"not": True}}},
    {"structured_outputs": {"json": {"$ref": "#"}}},
    {"structured_outputs": {"choice": ["x" * 200_000]}},
    {"structured_outputs": {"regex": "a", "json": {}}},
    {"structured_outputs": {}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "x"}}}},
    {"response_format": {"type": "yaml"}},
    {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    {"response_format": {"type": "json_object"}, "ignore_eos": True},
]

# Fails at some later token, or not at all.
COSTLY: list[dict[str, Any]] = [
    {"structured_outputs": {"regex": "((a{100}){100}){100}"}},
    {"structured_outputs": {"regex": "b((a{100}){100}){100}"}},
    {"structured_outputs": {"grammar": "start: " + " | ".join(f'"{n}"' for n in range(9000))}},
    {"structured_outputs": {"json": {"type": "string", "pattern": "(a+)+$" * 50}}},
    {"structured_outputs": {"regex": "(.*a.{20})+"}},
]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 160, **fields}


@pytest.fixture
def client(tight_server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{tight_server.url}/v1", api_key="none", max_retries=0)


def test_bystanders_do_not_notice_grammars_of_any_kind(tight_server: RunningServer) -> None:
    bystander = {"prompt": "once upon a time", "max_tokens": 40, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    structured = {"prompt": "some", "seed": 3, "max_tokens": 80, "response_format": format_of(SCHEMA)}

    async def run() -> None:
        async with open_client(tight_server) as http:
            expected = await complete(http, bystander)
            expected_json = await complete(http, structured)
            attacks = [http.post("/v1/chat/completions", json=chat(**hostile)) for hostile in HOSTILE + COSTLY]
            others = [complete(http, dict(bystander)) for _ in range(6)] + [complete(http, dict(structured))] * 1
            *found, found_json = (await asyncio.gather(asyncio.gather(*others), asyncio.gather(*attacks)))[0]
            assert all(answer.token_ids == expected.token_ids for answer in found)
            assert found_json.token_ids == expected_json.token_ids

    asyncio.run(run())


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_what_cannot_be_compiled_is_a_400_for_that_request_alone(
    tight_server: RunningServer, hostile: dict[str, Any]
) -> None:
    for stream in (False, True):
        reply = httpx.post(f"{tight_server.url}/v1/chat/completions", json=chat(**hostile, stream=stream), timeout=60)
        assert reply.status_code == 400, (reply.status_code, reply.text)
        error = reply.json()["error"]
        assert error["param"] in (*hostile, None), error
        assert "/work" not in error["message"] and "Traceback" not in error["message"]


def format_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def test_json_schema_over_both_routes_streamed_and_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**chat(response_format=format_of(SCHEMA), n=3, seed=1))
    for choice in whole.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    text = ""
    for chunk in client.chat.completions.create(**chat(response_format=format_of(SCHEMA), stream=True)):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    jsonschema.validate(json.loads(text), SCHEMA)
    plain = client.completions.create(
        model=MODEL_NAME, prompt="x", max_tokens=200, extra_body={"response_format": format_of(SCHEMA)}
    )
    jsonschema.validate(json.loads(plain.choices[0].text), SCHEMA)


def test_choice_regex_and_grammar(client: openai.OpenAI) -> None:
    def answer(**outputs: Any) -> str | None:
        reply = client.chat.completions.create(**chat(), extra_body={"structured_outputs": outputs})
        return reply.choices[0].message.content

    assert answer(choice=["left", "right"]) in ("left", "right")
    assert answer(regex="[0-9]{4}-[0-9]{2}")[4] == "-"  # type: ignore[index]
    assert answer(grammar='start: "ja" | "nein"') in ("ja", "nein")


class Pet(BaseModel):
    """A class that a client may want to parse."""

    name: str = Field(max_length=6)
    is_dog: bool
    age: int = Field(ge=0, le=30)


def test_parse_gives_pydantic_models(client: openai.OpenAI, tight_server: RunningServer) -> None:
    reply = client.chat.completions.parse(**chat(), response_format=Pet)
    assert isinstance(reply.choices[0].message.parsed, Pet)

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{tight_server.url}/v1", api_key="none") as own:
            replies = await asyncio.gather(
                *(own.chat.completions.parse(**chat(), response_format=Pet) for _ in range(4))
            )
            assert all(isinstance(reply.choices[0].message.parsed, Pet) for reply in replies)
            async with own.chat.completions.stream(**chat(), response_format=Pet) as stream:
                final = await stream.get_final_completion()
            assert isinstance(final.choices[0].message.parsed, Pet)

    asyncio.run(run())
