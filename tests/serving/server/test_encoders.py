"""A server of an encoder: vectors, usage, and one sentence for whoever asks it for text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.encoder_checkpoints import encoder_oracle, hidden_states, make_encoder, write_word_pieces
from tests.llm.test_encoders import TEXTS, ids_of
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

REFUSAL = "this model embeds texts: use /v1/embeddings"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_encoder(tmp_path_factory.mktemp("models") / "tiny", "bert", hidden_size=64, num_attention_heads=4)
    write_word_pieces(folder)
    return folder


@pytest.fixture(scope="module")
def server(encoder: Path) -> Iterator[object]:
    with start_server(EngineConfig(model=str(encoder), dtype="float32", max_num_seqs=4), ENGINE_MODULE) as running:
        yield running


def test_vectors_and_usage_are_those_of_whole_texts(server, encoder: Path) -> None:
    reply = server.client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    oracle, ids = encoder_oracle(encoder), [ids_of(encoder, text) for text in TEXTS]
    for own, entry in zip(ids, reply.data, strict=True):
        mean = hidden_states(oracle, own).mean(0)
        np.testing.assert_allclose(entry.embedding, (mean / mean.norm()).numpy(), atol=2e-5)
    assert reply.usage.prompt_tokens == sum(map(len, ids))


@pytest.mark.parametrize("stream", [False, True])
def test_who_asks_for_text_is_told_what_the_model_is_for(server, stream: bool) -> None:
    messages = [{"role": "user", "content": "hello"}]
    bodies = {
        "/v1/chat/completions": {"messages": messages, "stream": stream},
        "/v1/completions": {"prompt": "hello", "stream": stream},
        "/v1/responses": {"input": "hello", "stream": stream},
        "/v1/messages": {"messages": messages, "max_tokens": 4, "stream": stream},
    }
    for route, body in bodies.items():
        reply = server.post(route, {"model": "tiny", **body})
        assert reply.status_code == 400, route
        assert REFUSAL in reply.text


def test_it_is_healthy_and_holds_no_pages(server) -> None:
    assert server.http.get(f"{server.url}/health_generate").status_code == 200
    assert server.http.get(f"{server.url}/load").json()["kv_cache_usage_perc"] == 0


def test_a_text_longer_than_the_positions_is_refused_with_both_numbers(server) -> None:
    reply = server.post("/v1/embeddings", {"input": [[5] * 65]})
    assert reply.status_code == 400
    assert "64 tokens" in reply.text and "65 tokens" in reply.text
    assert server.post("/v1/embeddings", {"input": [[5] * 64]}).status_code == 200
