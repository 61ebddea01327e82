"""Compare replies' fields on prompts and the limits of tokens with transformers on the same checkpoint."""

import asyncio
import json
from functools import partial
from itertools import count

import httpx
import numpy as np
import pytest
import torch

from tests.checkpoints import load_oracle
from tests.seeding import seed_for
from tokenmill import LLM, SamplingParams
from tokenmill.core.errors import InvalidRequest

PROMPT = "the quick brown fox jumps over the lazy dog, and then it comes back and does it again " * 2


@pytest.fixture
def server(chunked_server):
    return chunked_server


@pytest.fixture(scope="module")
def oracle(tiny_checkpoint):
    """Log probabilities [T, V] of what follows each token."""
    model = load_oracle(tiny_checkpoint)

    def logprobs(token_ids):
        with torch.inference_mode():
            return torch.log_softmax(model(torch.tensor([token_ids])).logits[0].float(), -1)

    return logprobs


def complete(server, **fields):
    reply = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "temperature": 0} | fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def tokens_of(server, text):
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


def check_against(told, token_ids, expected, num_top):
    """vLLM's form: a list over the prompt's tokens, the first of which has nothing."""
    assert len(told) == len(token_ids)
    assert told[0] is None
    for position, entries in enumerate(told[1:], 1):
        row = expected[position - 1]
        own = entries[str(token_ids[position])]
        assert own["logprob"] == pytest.approx(float(row[token_ids[position]]), abs=1e-3)
        before, after = (int((row > row[token_ids[position]] + margin).sum()) for margin in (1e-3, -1e-3))
        assert 1 + before <= own["rank"] <= after, "but for ties"
        assert num_top <= len(entries) <= num_top + 1
        best = row.topk(num_top).values.tolist()
        likely = sorted((entry["logprob"] for entry in entries.values()), reverse=True)[:num_top]
        np.testing.assert_allclose(likely, best, atol=1e-3)


def test_prompt_logprobs_are_those_of_transformers_also_when_cached_before(server, oracle):
    complete(server)
    token_ids = tokens_of(server, PROMPT)
    assert len(token_ids) > 64, "several chunks"
    expected = oracle(token_ids)
    for _ in range(2):
        reply = complete(server, prompt_logprobs=4)
        check_against(reply["choices"][0]["prompt_logprobs"], token_ids, expected, 4)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "such a prompt is computed whole"
    after = complete(server)
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, "others still find it in the cache"
    assert "prompt_logprobs" not in after["choices"][0]


def test_a_chat_has_them_beside_its_choices(server, oracle):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "prompt_logprobs": 0}
    reply = server.post("/v1/chat/completions", body | {"return_token_ids": True}).json()
    token_ids = server.post("/tokenize", {"messages": body["messages"]}).json()["tokens"]
    assert reply["prompt_token_ids"] == token_ids
    check_against(reply["prompt_logprobs"], token_ids, oracle(token_ids), 0)


def test_preempted_in_the_middle_they_are_told_once(server, oracle):
    """More prompts at once than the pages hold: all are right all the same."""
    rng = np.random.default_rng(seed_for(__name__))
    prompts = [rng.integers(10, 300, size=200).tolist() for _ in range(6)]

    async def run():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            await client.post("/pause?mode=keep")
            body = {"max_tokens": 60, "ignore_eos": True, "prompt_logprobs": 1}
            posts = [client.post("/v1/completions", json=body | {"prompt": prompt}) for prompt in prompts]
            replies = asyncio.gather(*posts)
            wait = partial(server.wait_for, lambda: server.metric("num_requests_waiting") == len(prompts))
            await asyncio.to_thread(wait)
            await client.post("/resume")
            return await replies

    before = server.metric("num_preemptions_total")
    for prompt, reply in zip(prompts, asyncio.run(run()), strict=True):
        check_against(reply.json()["choices"][0]["prompt_logprobs"], prompt, oracle(prompt), 1)
    server.wait_for(lambda: server.metric("num_preemptions_total") > before)


def test_echo_puts_the_prompt_before_the_text_and_its_logprobs(server, oracle):
    plain = complete(server, logprobs=2)["choices"][0]
    echoed = complete(server, logprobs=2, echo=True)["choices"][0]
    assert echoed["text"] == PROMPT + plain["text"]
    token_ids = tokens_of(server, PROMPT)
    told = echoed["logprobs"]
    assert told["token_logprobs"][0] is None
    assert told["top_logprobs"][0] is None
    assert len(told["tokens"]) == len(token_ids) + 3
    expected = oracle(token_ids)
    own = [float(expected[i, token]) for i, token in enumerate(token_ids[1:])]
    np.testing.assert_allclose(told["token_logprobs"][1 : len(token_ids)], own, atol=1e-3)
    assert told["tokens"][len(token_ids) :] == plain["logprobs"]["tokens"]
    np.testing.assert_allclose(told["token_logprobs"][len(token_ids) :], plain["logprobs"]["token_logprobs"], atol=1e-4)
    assert "".join(told["tokens"]) == echoed["text"]
    assert told["text_offset"] == [len("".join(told["tokens"][:i])) for i in range(len(told["tokens"]))]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_without_a_token_after_it(server, stream):
    """`max_tokens` 0, as evaluation harnesses ask: what is told of the prompt is what an echo of it tells."""
    fields = {"prompt": [PROMPT, "hello there"], "logprobs": 1, "echo": True, "stop": ["o"]}
    echoed = complete(server, **fields, max_tokens=1)
    streaming = {"stream_options": {"include_usage": True}} if stream else {}
    scored = server.client.completions.create(model="tiny", max_tokens=0, stream=stream, **fields, **streaming)
    chunks = list(scored) if stream else [scored]
    choices = {choice.index: choice for chunk in chunks for choice in chunk.choices}
    for expected in echoed["choices"]:
        choice, length = choices[expected["index"]], len(expected["logprobs"]["tokens"]) - 1
        assert choice.text == fields["prompt"][expected["index"]]
        assert choice.logprobs.tokens == expected["logprobs"]["tokens"][:length]
        assert choice.logprobs.token_logprobs[0] is None
        np.testing.assert_allclose(
            choice.logprobs.token_logprobs[1:], expected["logprobs"]["token_logprobs"][1:length], atol=1e-4
        )
        assert (choice.finish_reason, choice.stop_reason) == ("length", None)
    usage = chunks[-1].usage
    assert (usage.completion_tokens, usage.prompt_tokens) == (0, echoed["usage"]["prompt_tokens"])


def test_nothing_is_nothing_without_an_echo(server):
    reply = server.post("/v1/completions", {"prompt": "x", "max_tokens": 0})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_token_ids_also_in_a_stream(server, stream):
    token_ids = tokens_of(server, "hello there")
    reply = server.client.completions.create(
        model="tiny", prompt=[token_ids, "hello there"], echo=True, max_tokens=2, stream=stream, n=2,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    texts, prompts = {}, {}
    for chunk in reply if stream else [reply]:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            prompts[choice.index] = prompts.get(choice.index) or getattr(choice, "prompt_token_ids", None)
    assert len(texts) == 4
    assert all(text.startswith("hello there") for text in texts.values())
    assert list(prompts.values()) == [token_ids] * 4


def test_a_prompt_is_cut_from_the_left(server):
    token_ids = tokens_of(server, PROMPT)
    cut = complete(server, truncate_prompt_tokens=7, return_token_ids=True)
    assert cut["choices"][0]["prompt_token_ids"] == token_ids[-7:]
    assert cut["usage"]["prompt_tokens"] == 7
    long = complete(server, prompt=[token_ids * 9], truncate_prompt_tokens=-1, max_tokens=5)
    assert long["usage"]["prompt_tokens"] == 507, "context of 512 less the output"
    assert server.post("/v1/completions", {"prompt": [token_ids * 9]}).status_code == 400


def test_only_allowed_tokens_come(server):
    for temperature in (0, 1.5):
        reply = complete(server, allowed_token_ids=[5, 77, 200], temperature=temperature, max_tokens=12,
                         return_token_ids=True, ignore_eos=True)  # fmt: skip
        assert set(reply["choices"][0]["token_ids"]) <= {5, 77, 200}


def test_bad_words_do_not_come(server):
    plain = complete(server, max_tokens=20, ignore_eos=True, return_token_ids=True)["choices"][0]
    pieces = [server.post("/detokenize", {"tokens": plain["token_ids"][i : i + 2]}).json()["prompt"] for i in (0, 3, 8)]
    words = [piece for piece in pieces if piece.strip() and "\ufffd" not in piece and tokens_of(server, piece)]
    words = words or [server.post("/detokenize", {"tokens": [token]}).json()["prompt"] for token in plain["token_ids"]]
    reply = complete(server, max_tokens=20, ignore_eos=True, return_token_ids=True, bad_words=words[:3])
    ids = reply["choices"][0]["token_ids"]
    for word in words[:3]:
        for spelled in (word.lstrip(), " " + word.lstrip()):
            banned = tokens_of(server, spelled)
            assert not any(ids[i : i + len(banned)] == banned for i in range(len(ids))), (word, ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", 21), ("prompt_logprobs", -1), ("prompt_logprobs", True), ("allowed_token_ids", []),
        ("allowed_token_ids", [331]), ("allowed_token_ids", [-1]), ("allowed_token_ids", [1] * 4097),
        ("bad_words", [""]), ("bad_words", [" "]), ("bad_words", ["x"] * 129), ("bad_words", ["x" * 257]),
        ("bad_words", "x"), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("best_of", 2),
        ("suffix", 1), ("echo", 1),
    ],
)  # fmt: skip
def test_values_without_a_sense_are_refused_by_name(server, field, value):
    reply = server.post("/v1/completions", {"prompt": "x", field: value})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), reply.text


def test_prompt_logprobs_come_with_whole_replies_only(server):
    reply = server.post("/v1/completions", {"prompt": "x", "prompt_logprobs": 1, "stream": True})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt_logprobs")


def test_offline_they_are_the_same(tiny_checkpoint, oracle):
    with LLM(tiny_checkpoint, dtype="float32", max_model_len=256) as llm:
        (result,) = llm.generate(PROMPT[:60], SamplingParams(max_tokens=2, prompt_logprobs=3), use_tqdm=False)
        expected = oracle(result.prompt_token_ids)
        assert result.prompt_logprobs[0] is None
        ids = result.prompt_token_ids[1:]
        own = [at[token].logprob for token, at in zip(ids, result.prompt_logprobs[1:], strict=True)]
        np.testing.assert_allclose(own, [float(expected[i, token]) for i, token in enumerate(ids)], atol=1e-3)
        assert all({1, 2, 3} <= {one.rank for one in at.values()} for at in result.prompt_logprobs[1:])
        for name, value in (("prompt_logprobs", 1), ("bad_words", ("x",))):
            with pytest.raises(InvalidRequest, match=name):
                llm.session().send("hello", SamplingParams(**{name: value}))


def stream_with_progress(server, wants, salt):
    """The events of a stream whose prompt comes in chunks of 32 tokens, and what they tell of these."""
    body = {"prompt": list(range(5, 205)), "max_tokens": 2, "stream": True, "temperature": 0, "cache_salt": salt}
    body["return_progress"] = wants
    with server.http.stream("POST", f"{server.url}/v1/completions", json=body) as reply:
        seen = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    return seen, [chunk["prompt_progress"] for chunk in seen if "prompt_progress" in chunk]


def test_a_stream_tells_how_far_its_prompt_is_computed(server):
    """A busy machine tells of the middle with the end: only some streams need to tell of it alone."""
    salts = (f"progress {number}" for number in count())

    def tells_of_the_middle():
        seen, told = stream_with_progress(server, True, next(salts))
        assert all(not chunk["choices"] for chunk in seen[: len(told) - 1]), "before the text"
        assert [one["total"] for one in told] == [200] * len(told)
        processed = [one["processed"] for one in told]
        assert processed == sorted(processed)
        assert processed[-1] == 200
        return processed[0] < 200

    server.wait_for(tells_of_the_middle)
    assert stream_with_progress(server, False, next(salts))[1] == []
