"""THREATS row G on the routes that `tests/integration/test_bystander.py` does not cover.

Any value in any field gives an answer below 500, the engine lives, and a bystander's texts stay the same.
"""

import asyncio
import itertools
import json

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.integration.serving import MODEL_NAME, TIGHT, open_client, serve
from tests.integration.test_bystander import VALUES, throw
from tokenmill.serving.server.anthropic.body import MessagesBody
from tokenmill.serving.server.generation.tokens import DetokenizeBody, TokenizeBody
from tokenmill.serving.server.openai.embeddings import EmbeddingBody
from tokenmill.serving.server.openai.responses_body import ResponsesBody
from tokenmill.serving.server.operators.admin import AbortBody
from tokenmill.serving.server.sglang.generate import NativeBody, NativeSampling

MESSAGES = [{"role": "user", "content": "x"}]
SHORT = {"max_new_tokens": 1}
ROUTES = {
    "/generate": (NativeBody, {"text": "x", "sampling_params": SHORT}),
    "/v1/embeddings": (EmbeddingBody, {"input": "x"}),
    "/v1/messages": (MessagesBody, {"model": MODEL_NAME, "messages": MESSAGES, "max_tokens": 1}),
    "/v1/responses": (ResponsesBody, {"input": "x", "max_output_tokens": 1}),
    "/tokenize": (TokenizeBody, {"prompt": "x"}),
    "/detokenize": (DetokenizeBody, {"tokens": [1]}),
    "/abort_requests": (AbortBody, {"request_ids": ["x"]}),
}
# Of some 4,000 pairs, others in each run.
NUM_CHECKS = 250
# What ends others.
LEFT_OUT = {("/abort_requests", "abort_all")}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "qwen3")
    with serve(model, *TIGHT) as running:
        yield running


def bodies(rng: np.random.Generator) -> list[tuple[str, str, str]]:
    """(path, what is odd, body) in random order."""
    found = []
    for path, (kind, base) in ROUTES.items():
        for field, (name, value) in itertools.product(kind.__struct_fields__, VALUES.items()):
            if (path, field) not in LEFT_OUT:
                others = {key: own for key, own in base.items() if key != field}
                found.append((path, f"{field}: {name}", json.dumps(others)[:-1] + f', "{field}": {value}}}'))
    for field, (name, value) in itertools.product(NativeSampling.__struct_fields__, VALUES.items()):
        others = {} if field == "max_new_tokens" else SHORT
        params = json.dumps(others)[:-1] + (", " if others else "") + f'"{field}": {value}}}'
        found.append(("/generate", f"{field}: {name}", f'{{"text": "x", "sampling_params": {params}}}'))
    found = [(path, what, body.replace("{, ", "{")) for path, what, body in found]
    rng.shuffle(found)
    return found


async def check(client, path, what, body):
    reply = await client.post(path, content=body)
    told = (path, what, reply.status_code, reply.text[:300])
    assert reply.status_code < 500, told
    if reply.status_code >= 400:
        assert reply.json()["error"]["message"], told
        assert "Traceback" not in reply.text, told
    if any(bad in what for bad in ("nan", "infinity", "beyond float")):
        assert reply.status_code == 400, told


def test_no_value_of_any_field_harms_a_bystander(server, rng):
    async def run() -> int:
        async with open_client(server) as client:
            checks = (check(client, *one) for one in bodies(rng)[:NUM_CHECKS])
            # In another batch the same sums may end in other last bits; log probabilities show them, tokens do not.
            return await throw(server, checks, lambda choice: choice["text"])

    assert asyncio.run(run()) > 0, "the bystander was there while it went on"
    assert server.is_well()
    server.wait_until_unused()
