"""THREATS row G: whoever gets a row after somebody else gets nothing of what was asked there."""

import asyncio
import contextlib
from typing import Any

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.integration.serving import MODEL_NAME, open_client, serve

TEXT = "/v1/completions"
PLAIN = {"model": MODEL_NAME, "prompt": "the mill grinds", "max_tokens": 12, "ignore_eos": True, "logprobs": 5}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ODD: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": [7, 8, 9]},
    "logit_bias": {"logit_bias": {str(token_id): -100 for token_id in range(10, 300)}},
    "bad_words": {"bad_words": ["the", "mill", "a", "e"]},
    "penalties": {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 9.0},
    "sampling": {"temperature": 2, "top_k": 3, "top_p": 0.1, "min_p": 0.9, "seed": 2**62},
    "ends": {"min_tokens": 10, "stop_token_ids": list(range(128)), "ignore_eos": False, "stop": ["e", "a"]},
    "grammar": {"structured_outputs": {"regex": "[ab]{40}"}},
    "schema": {"structured_outputs": {"json": SCHEMA}, "temperature": 1.5},
    "reports": {"prompt_logprobs": 20, "logprobs": 20, "n": 3, "temperature": 1},
    "long": {"prompt": [5] * 180, "temperature": 1},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Two rows: whoever comes next takes one that has just been left."""
    model = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3")
    with serve(model, "--num-pages", "60", "--page-size", "8", "--max-num-seqs", "2") as running:
        yield running


async def ask(client: httpx.AsyncClient) -> list[Any]:
    """A greedy answer, a drawn one, and one that counts its tokens, each to the last bit of its log probabilities."""
    bodies = (PLAIN | {"temperature": 0}, PLAIN | {"temperature": 1, "seed": 7}, PLAIN | {"presence_penalty": 0.5})
    return [(await client.post(TEXT, json=body | {"seed": 7})).json()["choices"] for body in bodies]


@pytest.mark.parametrize("name", ODD)
def test_a_row_starts_clean_however_its_last_owner_ended(server, name):
    body = PLAIN | {"max_tokens": 24, "ignore_eos": "structured_outputs" not in ODD[name]} | ODD[name]

    async def scenario() -> None:
        async with open_client(server) as client:
            await ask(client)
            expected = await ask(client)
            for _ in range(2):
                replies = await asyncio.gather(*(client.post(TEXT, json=body) for _ in range(2)))
                assert [reply.status_code for reply in replies] == [200, 200], replies[0].text
                assert await ask(client) == expected
                await leave_early(client, body)
                assert await ask(client) == expected

    asyncio.run(scenario())
    assert server.is_well()
    server.wait_until_unused()


async def leave_early(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Two streams whose clients are gone after the first event."""

    async def begin() -> None:
        fields = {name: value for name, value in body.items() if name != "prompt_logprobs"}
        async with client.stream("POST", TEXT, json=fields | {"stream": True}) as reply:
            with contextlib.suppress(StopAsyncIteration):
                await anext(reply.aiter_lines())

    await asyncio.gather(begin(), begin())
