"""A model whose logits are NaN for some prompts, behind the server: 500 for those, a count, and nobody else notices."""

import asyncio

import pytest

from tests.checkpoints import make_checkpoint
from tests.engine.runner.test_not_numbers import POISON, poisoned
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

ILL = [12, 50, POISON, 90]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    checkpoint = poisoned(make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3"))
    engine = EngineConfig(model=str(checkpoint), num_pages=64, max_num_seqs=16)
    with start_server(engine, ENGINE_MODULE) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ILL, "temperature": 0}),
        ("/v1/completions", {"prompt": ILL, "temperature": 1.0, "stream": True}),
        ("/v1/completions", {"prompt": ILL, "structured_outputs": {"regex": "[a-z]{5}"}}),
        ("/v1/completions", {"prompt": ILL, "prompt_logprobs": 1, "logprobs": 1}),
        ("/v1/embeddings", {"input": [[1, 2, 3], ILL]}),
        ("/v1/embeddings", {"input": ILL, "pooling": "mean", "encoding_format": "base64"}),
    ],
)
def test_it_is_the_servers_fault_and_counted(server, path, fields):
    before = server.metric("corrupted_requests_total")
    reply = server.post(path, {"model": "tiny", **fields})
    assert reply.status_code == 500, reply.text
    assert "NaN or infinite" in reply.json()["error"]["message"]
    server.wait_for(lambda: server.metric("corrupted_requests_total") == before + 1)
    server.wait_until_unused()
    assert server.http.get(f"{server.url}/health").status_code == 200


def test_a_bystander_in_the_same_steps_keeps_its_text(server):
    asked = {"model": "tiny", "prompt": "the quick brown fox", "max_tokens": 40, "seed": 5, "temperature": 1.0}
    asked["extra_body"] = {"ignore_eos": True, "logit_bias": {str(POISON): -100}}

    async def text(client) -> str:
        return (await client.completions.create(**asked)).choices[0].text

    async def among_others() -> str:
        client = server.async_client
        bystander = asyncio.create_task(text(client))
        ill = [
            client.completions.create(model="tiny", prompt=[*ILL, number], max_tokens=5, timeout=60)
            for number in range(10, 30)
        ]
        failures = await asyncio.gather(*ill, return_exceptions=True)
        assert [getattr(failure, "status_code", None) for failure in failures] == [500] * 20
        return await bystander

    alone = asyncio.run(text(server.async_client))
    assert asyncio.run(among_others()) == alone
