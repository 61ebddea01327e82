"""Vectors of a decoder, compared with transformers' hidden states of the same checkpoint."""

import asyncio
import base64

import httpx
import numpy as np
import pytest
import torch
import transformers

TEXTS = [
    "the quick brown fox",
    "hello",
    "the quick brown fox jumps over the lazy dog " * 5,
    "the quick brown fox jumps",
]


@pytest.fixture
def server(chunked_server):
    return chunked_server


@pytest.fixture(scope="module")
def states(tiny_checkpoint):
    """The last hidden states [T, H] of a text, after the final norm."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = transformers.AutoModel.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()

    def of(text):
        with torch.inference_mode():
            return model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].double()

    return of


def normalized(vector) -> np.ndarray:
    return (vector / vector.norm()).numpy()


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_those_of_transformers_also_when_the_prompt_is_cached(server, states, pooling):
    server.post("/v1/completions", {"prompt": TEXTS[2], "max_tokens": 1})
    reply = server.client.embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": pooling})
    assert [entry.index for entry in reply.data] == [0, 1, 2, 3]
    for text, entry in zip(TEXTS, reply.data, strict=True):
        own = states(text).mean(0) if pooling == "mean" else states(text)[-1]
        np.testing.assert_allclose(entry.embedding, normalized(own), atol=2e-5)
        assert np.linalg.norm(entry.embedding) == pytest.approx(1.0, abs=1e-6)
    num_tokens = sum(len(states(text)) for text in TEXTS)
    assert (reply.usage.prompt_tokens, reply.usage.total_tokens) == (num_tokens, num_tokens)


def test_base64_holds_the_same_floats(server):
    plain = server.post("/v1/embeddings", {"input": "hello"}).json()["data"][0]["embedding"]
    encoded = server.post("/v1/embeddings", {"input": "hello", "encoding_format": "base64"}).json()
    np.testing.assert_array_equal(
        np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f4"), np.array(plain, np.float32)
    )


def test_token_ids_stand_for_their_text(server):
    ids = server.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    inputs = (ids, [ids], [TEXTS[0]], TEXTS[0])
    replies = [server.post("/v1/embeddings", {"input": same}).json() for same in inputs]
    assert [reply["data"] for reply in replies] == [replies[0]["data"]] * 4


def test_llama_cpps_route_has_the_same_vectors_in_lists(server):
    ids = server.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"]
    wanted = [one["embedding"] for one in server.post("/v1/embeddings", {"input": [TEXTS[1], ids]}).json()["data"]]
    for name in ("content", "input"):
        reply = server.post("/embedding", {name: [TEXTS[1], ids]}).json()
        assert reply == [{"index": index, "embedding": [vector]} for index, vector in enumerate(wanted)]
    ((raw,),) = (one["embedding"] for one in server.post("/embedding", {"content": ids, "embd_normalize": -1}).json())
    assert np.linalg.norm(raw) != pytest.approx(1.0, abs=0.01)
    np.testing.assert_allclose(np.array(raw) / np.linalg.norm(raw), wanted[1], atol=1e-6)
    assert server.post("/embedding", {"content": "a", "embd_normalize": 1}).status_code == 400
    assert server.post("/embedding", {}).status_code == 400


def test_beside_generation_both_are_as_alone(server):
    body = {"prompt": TEXTS[0], "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    text = server.post("/v1/completions", body).json()["choices"]
    vector = server.post("/v1/embeddings", {"input": TEXTS[2]}).json()["data"]

    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            texts = [client.post("/v1/completions", json=body) for _ in range(3)]
            vectors = [client.post("/v1/embeddings", json={"input": TEXTS[2]}) for _ in range(6)]
            return await asyncio.gather(*texts, *vectors)

    replies = [reply.json() for reply in asyncio.run(run())]
    assert all(reply["choices"] == text for reply in replies[:3])
    for reply in replies[3:]:
        np.testing.assert_allclose(reply["data"][0]["embedding"], vector[0]["embedding"], atol=1e-6)
    server.wait_until_unused()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "dimensions": 8}, "dimensions"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", 1]}, "input"),
        ({"input": [331]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [1] * 513}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "pooling": "max"}, "pooling"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({}, "input"),
    ],
)
def test_what_has_no_vector_is_refused(server, body, param):
    reply = server.post("/v1/embeddings", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_another_model_is_not_found(server):
    assert server.post("/v1/embeddings", {"input": "x", "model": "ada"}).status_code == 404
