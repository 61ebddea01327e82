import asyncio
import csv
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from tests.integration.serving import serve
from tokenmill.cli.main import main
from tokenmill.lab.bench.report import distribution_of_requests, percentile
from tokenmill.lab.bench.samples import request_samples
from tokenmill.lab.bench.streams import Backend, Stream, run_pooled, run_stream
from tokenmill.lab.bench.workload import Prompt

PROMPT = Prompt([1, 2, 3], output_len=3)
PIECES = [
    b'data: {"choices": [{"text": "", "token_ids": [7]}]}\n\n',
    b': a comment\n\ndata: {"choices": [{"text": "ab", "token_ids": [8, 9], "finish_reason": "length"}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}\n\n',
    b"data: [DONE]\n\n",
]


def answer(pieces: list[bytes], status: int = 200) -> Stream:
    """Return the result of `run_stream` for a reply in these pieces; a piece may be split anywhere."""

    async def content() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece[:9]
            await asyncio.sleep(0.005)
            yield piece[9:]

    async def run() -> Stream:
        transport = httpx.MockTransport(lambda request: httpx.Response(status, content=content()))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await run_stream(client, "m", PROMPT, {})

    return asyncio.run(run())


def test_pieces_are_timed_and_their_tokens_counted():
    stream = answer(PIECES)
    assert (stream.error, stream.num_tokens, len(stream.arrivals)) == (None, 3, 2)
    assert stream.ttft >= 0.004
    assert stream.gaps[0] >= 0.004
    assert stream.seconds_per_token == pytest.approx(stream.gaps[0] / 2)


def test_a_server_without_token_ids_and_usage_is_counted_by_its_pieces():
    stream = answer([*(b'data: {"choices": [{"text": "x"}]}\n\n' for _ in range(3)), PIECES[-1]])
    assert (stream.error, stream.num_tokens, len(stream.gaps)) == (None, 3, 2)


@pytest.mark.parametrize(
    ("pieces", "status", "error", "detail"),
    [
        ([b'{"error": {"message": "busy"}}'], 429, "status 429", "busy"),
        ([PIECES[0], b'data: {"error": {"message": "lost"}}\n\n', PIECES[-1]], 200, "error event", "lost"),
        (PIECES[:2], 200, "broken stream", "without [DONE]"),
        ([b'data: {"choices": [{\n\n'], 200, "broken stream", "DecodeError"),
        ([PIECES[0], PIECES[-1]], 200, "short answer", "1 of 3 tokens"),
        ([PIECES[-1]], 200, "short answer", "0 of 3 tokens"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(pieces, status, error, detail):
    stream = answer(pieces, status)
    assert stream.error == error
    assert detail in stream.detail


def test_a_request_without_a_whole_answer_is_a_sample_with_its_error():
    whole, cut, none = answer(PIECES), answer([PIECES[0], PIECES[-1]]), answer([b"busy"], 503)
    rows = list(request_samples([whole, cut, none]))
    assert [row["error"] for row in rows] == [None, "short answer", "status 503"]
    assert rows[0]["e2e_seconds"] == pytest.approx(whole.ttft + whole.gaps[0])
    assert (rows[1]["ttft_seconds"], rows[1]["e2e_seconds"]) == (cut.ttft, None)
    assert (rows[2]["ttft_seconds"], rows[2]["inter_token_seconds"]) == (None, [])


def pooled(content: bytes, status: int = 200, backend: Backend = Backend.EMBEDDINGS) -> tuple[Stream, dict]:
    """Return the result of `run_pooled` for two texts and an answer, and the body that was sent."""
    sent = []

    def reply(request: httpx.Request) -> httpx.Response:
        sent.append({"path": request.url.path, **json.loads(request.content)})
        return httpx.Response(status, content=content)

    async def run() -> Stream:
        async with httpx.AsyncClient(transport=httpx.MockTransport(reply), base_url="http://server") as client:
            return await run_pooled(client, "m", [Prompt([1, 2], 0), Prompt([3], 0)], backend)

    return asyncio.run(run()), sent[0]


def test_vectors_are_asked_of_token_ids_and_counted_by_the_server():
    stream, sent = pooled(b'{"data": [{"embedding": [1]}, {"embedding": [2]}], "usage": {"prompt_tokens": 9}}')
    assert sent == {"path": "/v1/embeddings", "model": "m", "input": [[1, 2], [3]]}
    assert (stream.error, stream.num_prompt_tokens, stream.num_tokens) == (None, 9, 0)
    assert (stream.prompt.token_ids, stream.gaps) == ([1, 2, 3], [])


def test_scores_are_asked_of_a_query_and_documents():
    stream, sent = pooled(b'{"results": [{"index": 1}, {"index": 0}]}', backend=Backend.RERANK)
    assert sent == {"path": "/v1/rerank", "model": "m", "query": "1 2", "documents": ["1 2", "3"]}
    assert (stream.error, stream.num_prompt_tokens) == (None, None)


@pytest.mark.parametrize(
    ("content", "status", "error"),
    [(b"{}", 429, "status 429"), (b"{", 200, "broken answer"), (b'{"data": [{}]}', 200, "short answer")],
)
def test_an_answer_without_all_vectors_is_an_error(content, status, error):
    assert pooled(content, status)[0].error == error


def test_vectors_under_load_are_measured(tiny_model, capsys):
    load = ["--num-prompts", "30", "--random-batch-size", "4", "--max-concurrency", "3", "--max-token-id", "300"]
    with serve(tiny_model) as server:
        url = ["--url", server.url, "--backend", "openai-embeddings"]
        assert main(["bench", "serve", *url, *load]) == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert main(["bench", "serve", "--url", server.url, "--backend", "vllm-rerank"]) == 1
        assert "status 400" in capsys.readouterr().err
    assert (document["completed"], document["errors"], document["output_tokens"]) == (8, {}, 0)
    assert document["total_tokens_per_second"] == pytest.approx(document["input_tokens"] / document["seconds"])
    assert document["workload"]["batch_size"] == 4
    assert (document["inter_token_seconds"], document["time_per_output_token_seconds"]) == (None, None)
    assert 0 < document["e2e_seconds"]["p50"] <= document["e2e_seconds"]["p99"]


def test_flags_that_do_not_fit_the_kind_of_load_are_named(capsys):
    for flags in (["--random-batch-size", "2"], ["--backend", "openai-embeddings", "--images", "1"]):
        assert main(["bench", "serve", *flags]) != 0
        assert flags[-2] in capsys.readouterr().err


def test_a_server_under_load_is_measured(tiny_model, capsys, tmp_path):
    picture, raw = tmp_path / "out.svg", tmp_path / "requests.csv"
    # Long enough that not every answer arrives in one piece, which would leave nothing between tokens to measure.
    load = ["--num-prompts", "24", "--max-concurrency", "6", "--output-len", "30:60", "--max-token-id", "300"]
    with serve(tiny_model) as server:
        assert main(["bench", "serve", "--url", server.url, *load, "--plot", str(picture), "--samples", str(raw)]) == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        server.wait_for(lambda: server.metric("generation_tokens_total") >= document["output_tokens"])
        # The prompts of this one are outside the vocabulary.
        assert main(["bench", "serve", "--url", server.url, "--max-token-id", "900000"]) == 1
        assert "status 400" in capsys.readouterr().err
        rate = ["--num-prompts", "10", "--request-rate", "40", "--burstiness", "4", "--output-len", "1"]
        assert main(["bench", "serve", "--url", server.url, *rate, "--max-token-id", "300"]) == 0
        paced = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["completed"], document["errors"]) == (24, {})
    assert document["output_tokens_per_second"] == pytest.approx(document["output_tokens"] / document["seconds"])
    for name in ("ttft", "inter_token", "time_per_output_token", "e2e"):
        figures = document[f"{name}_seconds"]
        assert 0 <= figures["p50"] <= figures["p90"] <= figures["p99"], name
    assert document["workload"]["max_concurrency"] == 6
    assert document["workload"]["request_rate"] is None
    assert paced["workload"]["variation"] == 0.5
    # A single token has nothing after it.
    assert paced["inter_token_seconds"] is None
    drawn = picture.read_text()
    assert "bench serve: tiny, 24 requests, at most 6 at once" in drawn
    for title in ("time to first token", "time per output token"):
        assert title in drawn
    assert f"p99: {document['ttft_seconds']['p99'] * 1e3:.4g} ms" in drawn
    rows = list(csv.DictReader(raw.open()))
    assert [row["request"] for row in rows] == [str(number) for number in range(1, 25)]
    assert sum(int(row["output_tokens"]) for row in rows) == document["output_tokens"]
    ttft = [float(row["ttft_seconds"]) for row in rows]
    assert distribution_of_requests(ttft) == document["ttft_seconds"]
    gaps = [float(gap) for row in rows for gap in row["inter_token_seconds"].split()]
    assert percentile(gaps, 50) == pytest.approx(document["inter_token_seconds"]["p50"])


def test_a_server_that_is_not_there_is_named(capsys):
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1" in capsys.readouterr().err
