"""Routes of retrieval on an embedder, a reranker and a classifier, in the shapes that their clients read."""

import base64
import json

import httpx
import numpy as np
import pytest
from langchain_openai import OpenAIEmbeddings

from tests.embedders import Modules, States, judged, make_classifier, make_embedder, make_judge, pooled, unit
from tests.seeding import seed_for
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.model.pooling.pair_template import INSTRUCTION, QWEN3
from tokenmill.serving.replicas.starter import ENGINE_MODULE

SEED = seed_for(__name__)
TEXTS = ["the quick brown fox", "hello", "the quick brown fox jumps over the lazy dog " * 3, "a mill"]
PROMPTS = {"query": "find: ", "document": "text: "}
SIZES = {"dtype": "float32", "num_pages": 96, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    folder = make_embedder(tmp_path_factory.mktemp("models") / "e", Modules(prompts=PROMPTS), seed=SEED)
    engine = EngineConfig(model=str(folder), matryoshka=True, max_model_len=200, **SIZES)
    with start_server(engine, ENGINE_MODULE) as server:
        server.states = States(folder)
        yield server


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    folder = make_judge(tmp_path_factory.mktemp("models") / "j", seed=SEED)
    engine = EngineConfig(model=str(folder), task="rerank", truncate_inputs="right", max_model_len=400, **SIZES)
    batches = str(tmp_path_factory.mktemp("batches"))
    with start_server(engine, ENGINE_MODULE, batch_dir=batches) as server:
        server.folder = folder
        yield server


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    folder = make_classifier(tmp_path_factory.mktemp("models") / "c", 3, seed=SEED)
    with start_server(EngineConfig(model=str(folder), **SIZES), ENGINE_MODULE) as server:
        yield server


def model_of(server):
    return server.http.get(f"{server.url}/v1/models").json()["data"][0]["id"]


def vector(server, text, dimensions=None):
    return unit(pooled(server.states(text), ("lasttoken",))[:dimensions])


def relevance(reply):
    return [one["relevance_score"] for one in reply["results"]]


def sigmoid(value):
    return 1 / (1 + np.exp(-value))


def refusal(server, path, body):
    reply = server.post(path, body)
    assert reply.status_code == (422 if path == "/embed" else 400), reply.text
    error = reply.json()["error"]
    return error if isinstance(error, str) else error["message"]


def test_v1_embeddings_takes_what_clients_send(embedder):
    reply = embedder.client.embeddings.create(
        model=model_of(embedder), input=TEXTS
    )  # base64, as the client asks by itself
    np.testing.assert_allclose(
        [one.embedding for one in reply.data], [vector(embedder, one) for one in TEXTS], atol=2e-5
    )
    tokens = [embedder.states.tokenizer.encode(text).ids for text in TEXTS]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == sum(map(len, tokens))
    cut = embedder.client.embeddings.create(model=model_of(embedder), input=TEXTS[0], dimensions=8)
    np.testing.assert_allclose(cut.data[0].embedding, vector(embedder, TEXTS[0], 8), atol=2e-5)
    nothing = {"dimensions": None, "user": None, "encoding_format": None, "prompt_name": None, "normalize": None}
    plain = embedder.post("/v1/embeddings", {"input": tokens, **nothing}).json()["data"]
    np.testing.assert_allclose([one["embedding"] for one in plain], [one.embedding for one in reply.data], atol=1e-6)
    text = PROMPTS["query"] + TEXTS[0]
    for fields in ({"prompt_name": "query"}, {"input_type": "query"}, {"task": "retrieval.query"}):
        body = {"input": TEXTS[0], "encoding_format": "base64", **fields}
        found = embedder.post("/v1/embeddings", body).json()["data"][0]["embedding"]
        np.testing.assert_allclose(np.frombuffer(base64.b64decode(found), "<f4"), vector(embedder, text), atol=2e-5)
    raw = embedder.post("/v1/embeddings", {"input": TEXTS[0], "normalized": False}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(raw, embedder.states(TEXTS[0])[-1], atol=2e-4)


def test_langchain_embeds_texts_and_ids_are_warned_of(embedder):
    langchain = OpenAIEmbeddings(
        model=model_of(embedder), base_url=f"{embedder.url}/v1", api_key="x", check_embedding_ctx_length=False
    )
    np.testing.assert_allclose(langchain.embed_documents(TEXTS), [vector(embedder, one) for one in TEXTS], atol=2e-5)
    for _ in range(2):
        assert embedder.post("/v1/embeddings", {"input": [[1, 2], [3]]}).status_code == 200
    assert embedder.output().count("token ids instead of texts") == 1


def test_2048_texts_are_one_call(embedder):
    reply = embedder.post("/v1/embeddings", {"input": [f"the {n % 7}" for n in range(2048)]}).json()
    found = np.array([one["embedding"] for one in reply["data"]])
    assert [one["index"] for one in reply["data"]] == list(range(2048))
    np.testing.assert_allclose(found[:7], [vector(embedder, f"the {n}") for n in range(7)], atol=2e-5)
    np.testing.assert_array_equal(found, np.resize(found[:7], found.shape)), "alike in all batches"
    embedder.wait_until_unused()


def test_models_say_what_they_are_for_and_refuse_the_rest(embedder, judge, classifier):
    for server, task, route in (
        (embedder, "embed", "/v1/embeddings"),
        (judge, "rerank", "/rerank"),
        (classifier, "classify", "/classify"),
    ):
        assert server.http.get(f"{server.url}/v1/models").json()["data"][0]["task"] == task
        for path, body in {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
            "/v1/completions": {"prompt": "hi"},
            "/v1/messages": {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]},
            "/generate": {"text": "hi"},
        }.items():
            assert f"use {route}" in refusal(
                server, path, body | ({"model": model_of(server)} if "model" in body else {})
            )
    assert "makes no vectors" in refusal(judge, "/v1/embeddings", {"input": "x"})
    assert "has no labels" in refusal(embedder, "/classify", {"input": "x"})
    assert "does not compare texts" in refusal(classifier, "/rerank", {"query": "x", "documents": ["y"]})


def test_rerank_answers_in_the_shape_of_each_client(judge):
    def logit(document, instruction=INSTRUCTION):
        text = QWEN3.replace("{instruction}", instruction).replace("{query}", "what").replace("{document}", document)
        return judged(judge.folder, text)

    scores = [sigmoid(logit(text)) for text in TEXTS]
    order = sorted(range(4), key=lambda index: -scores[index])
    body = {"model": model_of(judge), "query": "what", "documents": TEXTS, "top_n": 3}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank", "/v1/reranking"):
        reply = judge.post(path, body).json()
        assert [one["index"] for one in reply["results"]] == order[:3]
        np.testing.assert_allclose(
            [one["relevance_score"] for one in reply["results"]], [scores[i] for i in order[:3]], atol=1e-4
        )
        assert reply["model"] == model_of(judge) and reply["id"].startswith("rerank-")
        assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] > 0
        shown = [one.get("document") for one in reply["results"]]
        assert shown == ([None] * 3 if path == "/v2/rerank" else [{"text": TEXTS[i]} for i in order[:3]])
    bare = judge.post("/v1/rerank", {**body, "return_documents": False, "top_n": 0}).json()["results"]
    assert [one.keys() for one in bare] == [{"index", "relevance_score"}] * 4
    assert judge.post("/v1/reranking", {**body, "top_n": 0}).json()["results"] == []
    objects = [{"text": text, "title": "x"} for text in TEXTS]
    assert (
        judge.post("/v1/rerank", {**body, "documents": objects, "top_n": None}).json()["results"][0]["index"]
        == order[0]
    )
    raw = judge.post("/rerank", {**body, "raw_scores": True, "instruction": "Judge"}).json()["results"]
    np.testing.assert_allclose(
        [one["relevance_score"] for one in raw], sorted([logit(text, "Judge") for text in TEXTS])[:0:-1], atol=1e-3
    )
    tei = judge.post("/rerank", {"query": "what", "texts": TEXTS, "return_text": True, "truncate": True}).json()
    assert [(one["index"], one["text"]) for one in tei] == [(i, TEXTS[i]) for i in order]
    score = judge.post("/v1/score", {"text_1": "what", "text_2": TEXTS}).json()
    np.testing.assert_allclose([one["score"] for one in score["data"]], scores, atol=1e-4)
    assert {one["object"] for one in score["data"]} == {"score"} and score["object"] == "list"
    long = judge.post("/rerank", {"query": "what", "documents": ["hello " * 900, "hello"]})
    assert long.status_code == 200, "--truncate-inputs right"
    assert "length is 400" in refusal(judge, "/rerank", {"query": "what", "texts": ["hello " * 900], "truncate": False})


def test_an_embedder_reranks_by_the_cosine_of_its_prompted_texts(embedder):
    query = vector(embedder, PROMPTS["query"] + "what")
    want = [query @ vector(embedder, PROMPTS["document"] + text) for text in TEXTS]
    reply = embedder.post("/v1/rerank", {"query": "what", "documents": TEXTS}).json()["results"]
    by_index = {one["index"]: one["relevance_score"] for one in reply}
    np.testing.assert_allclose([by_index[index] for index in range(4)], want, atol=2e-5)
    for names in (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        pairs = embedder.post("/score", {names[0]: ["what"] * 4, names[1]: TEXTS}).json()["data"]
        np.testing.assert_allclose([one["score"] for one in pairs], want, atol=2e-5)


def test_classify_pooling_and_the_routes_of_tei(embedder, classifier):
    reply = classifier.post("/classify", {"input": TEXTS}).json()
    for index, one in enumerate(reply["data"]):
        assert one["index"] == index and one["num_classes"] == 3 and sum(one["probs"]) == pytest.approx(1)
        assert one["label"] == f"LABEL_{np.argmax(one['probs'])}"
    probs = [one["probs"] for one in reply["data"]]
    assert [one["data"] for one in classifier.post("/pooling", {"input": TEXTS}).json()["data"]] == probs
    (best, *_), *_ = classifier.post("/predict", {"inputs": [[text] for text in TEXTS]}).json()
    assert best == {"score": max(probs[0]), "label": reply["data"][0]["label"]}
    assert len(classifier.post("/predict", {"inputs": ["a", "b"]}).json()) == 3, "two texts are one pair"
    assert classifier.post("/predict", {"inputs": TEXTS[0]}).json()[0] == best
    found = embedder.post("/embed", {"inputs": TEXTS[0], "prompt_name": "query", "dimensions": 8}).json()
    np.testing.assert_allclose(found, [vector(embedder, PROMPTS["query"] + TEXTS[0], 8)], atol=2e-5)
    pooling = embedder.post("/pooling", {"input": TEXTS}).json()["data"]
    np.testing.assert_allclose([one["data"] for one in pooling], [vector(embedder, text) for text in TEXTS], atol=2e-5)
    error = embedder.post("/predict", {"inputs": "x"})
    assert error.status_code == 424 and error.json() == {"error": error.json()["error"], "error_type": "backend"}


def test_batches_take_lines_of_embeddings_and_of_rerank(judge):
    lines = [
        {
            "custom_id": str(n),
            "method": "POST",
            "url": "/v1/rerank",
            "body": {"query": "what", "documents": TEXTS[: n + 1]},
        }
        for n in range(3)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = judge.client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = judge.client.batches.create(input_file_id=file.id, endpoint="/v1/rerank", completion_window="24h")
    judge.wait_for(lambda: judge.client.batches.retrieve(batch.id).status in ("completed", "failed"), 60)
    ended = judge.client.batches.retrieve(batch.id)
    assert ended.status == "completed" and ended.request_counts.completed == 3
    output = judge.client.files.content(ended.output_file_id).text.splitlines()
    counts = {(line := json.loads(one))["custom_id"]: len(line["response"]["body"]["results"]) for one in output}
    assert counts == {"0": 1, "1": 2, "2": 3}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"input": ["x"] * 2049}, "2049 texts in one request; at most 2048"),
        ("/v1/embeddings", {"input": "x", "dimensions": 33}, "at most 32, got 33"),
        ("/v1/embeddings", {"input": "x", "prompt_name": "passage"}, "no prompt 'passage'; it has query, document"),
        ("/v1/embeddings", {"input": ["x", "hello " * 300]}, "input[1] has "),
        ("/v1/embeddings", {"input": [[1, 5000]]}, "input[0]: token id 5000 is outside the vocabulary of 331"),
        ("/rerank", {"query": "x"}, "documents is missing"),
        ("/rerank", {"query": "x", "documents": []}, "documents is empty"),
        ("/rerank", {"query": "x", "documents": ["a"], "texts": ["b"]}, "two names of one field"),
        ("/rerank", {"query": "x", "documents": [{"title": "a"}]}, "documents[0] has no text in text"),
        ("/rerank", {"query": "x", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "x", "documents": ["a"], "instruction": "b"}, "instruction: this model takes none"),
        ("/rerank", {"query": "x", "documents": [1]}, "documents[0]"),
        ("/score", {"text_1": "x"}, "two sides are compared"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["a", "b", "c"]}, "2 texts in text_1 and 3 in text_2"),
        ("/pooling", {"input": "x", "task": "token_embed"}, "task token_embed is not supported"),
        ("/embed", {"inputs": []}, "inputs must be a string"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(embedder, path, body, said):
    assert said in refusal(embedder, path, body)


def test_two_kinds_of_texts_at_once_are_each_as_alone(embedder):
    one = embedder.post("/v1/embeddings", {"input": TEXTS}).json()["data"]
    with httpx.Client(base_url=embedder.url, timeout=60) as client:
        again = client.post("/v1/embeddings", json={"input": TEXTS[::-1]}).json()["data"]
    assert [entry["embedding"] for entry in again[::-1]] == [entry["embedding"] for entry in one]
