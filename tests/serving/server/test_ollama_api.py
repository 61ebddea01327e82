"""Ollama's API with Ollama's own client, against the stub engine, which repeats the prompt."""

import json

import httpx
import ollama
import pytest

from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.core.answer import AnswerPiece, PieceKind
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.serving.server.generation.writer import UsageCounter
from tokenmill.serving.server.ollama.writer import LineWriter

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the mill"}}\n</tool_call>'
AT = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK = {"type": "function", "function": {"name": "look", "parameters": AT}}
HELLO = [{"role": "user", "content": "hello there"}]
FEW = {"num_predict": 12}


@pytest.fixture(scope="module")
def server(stub_model):
    parsers = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True, "reasoning_parser": "qwen3"}
    with start_server(EngineConfig(model=str(stub_model)), served_model_name=("echo",), **parsers) as running:
        yield running


@pytest.fixture
def client(server):
    return ollama.Client(host=server.url, timeout=30)


def rendered(server, messages) -> str:
    """The prompt of a chat as the model gets it, which the stub repeats."""
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    return server.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def lines_of(reply: httpx.Response) -> list[dict]:
    assert reply.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in reply.text.splitlines()]


def test_an_answer_is_the_same_as_by_openai(server, client):
    reply = client.chat("echo", HELLO, options=FEW)
    chat = server.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 12}).json()
    assert reply.message.content == chat["choices"][0]["message"]["content"]
    assert (reply.done, reply.done_reason, reply.model) == (True, "length", "echo")
    assert (reply.prompt_eval_count, reply.eval_count) == (chat["usage"]["prompt_tokens"], 12)
    assert reply.total_duration > 0


def test_a_stream_brings_the_same_text_in_lines(server, client):
    parts = list(client.chat("echo:latest", HELLO, options=FEW, stream=True))
    assert "".join(part.message.content for part in parts) == client.chat("echo", HELLO, options=FEW).message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    raw = lines_of(server.post("/api/chat", {"model": "echo", "messages": HELLO, "options": FEW}))
    assert raw[-1]["done_reason"] == "length", "streams are the default"
    assert {line["model"] for line in raw} == {"echo"}


def test_a_prompt_is_a_chat_unless_it_is_raw(server, client):
    chat = client.chat("echo", [{"role": "system", "content": "be"}, *HELLO], options=FEW)
    assert client.generate("echo", "hello there", system="be", options=FEW).response == chat.message.content
    text = server.post("/v1/completions", {"prompt": "hello there", "max_tokens": 5}).json()["choices"][0]["text"]
    assert client.generate("echo", "hello there", raw=True, options={"num_predict": 5}).response == text
    parts = client.generate("echo", "hello there", raw=True, options={"num_predict": 5}, stream=True)
    assert "".join(part.response for part in parts) == text


def test_options_are_heeded_or_named(server):
    options = {"num_predict": 30, "stop": ["th"], "seed": -1, "temperature": 0, "num_ctx": 4096, "mirostat": 1}
    body = {"model": "echo", "prompt": "hello there", "raw": True, "stream": False, "options": options}
    reply = server.post("/api/generate", body)
    assert (reply.json()["response"], reply.json()["done_reason"]) == ("hello ", "stop")
    assert set(reply.headers["x-tokenmill-ignored"].split(", ")) == {"options.num_ctx", "options.mirostat"}
    for name, wrong in (("temperature", "hot"), ("num_predict", 1.5), ("stop", [1]), ("top_k", 1 << 40)):
        reply = server.post("/api/generate", body | {"options": {name: wrong}})
        assert reply.status_code == 400
        assert reply.json()["error"].startswith(f"options.{name}")
        assert "$" not in reply.json()["error"], reply.text


def test_a_stream_of_an_answer_without_a_word_is_its_last_line(server):
    body = {"model": "echo", "prompt": "hello there", "raw": True, "options": {"stop": ["h"]}}
    reply = server.post("/api/generate", body)
    assert reply.status_code == 200
    (line,) = map(json.loads, reply.text.splitlines())
    assert (line["response"], line["done"], line["done_reason"]) == ("", True, "stop")


def test_a_format_holds_the_answer(chunked_server):
    client, name = ollama.Client(host=chunked_server.url, timeout=30), "tiny"
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(client.chat(name, HELLO, format=schema).message.content)["a"] in (1, 2)
    with pytest.raises(ollama.ResponseError, match="schema"):
        client.chat(name, HELLO, format={"type": "nonsense"})


def test_calls_come_whole_and_go_back(server, client):
    messages = [{"role": "user", "content": CALL}]
    asked = {"tools": [LOOK], "options": {"num_predict": 400}}
    for reply in (client.chat("echo", messages, **asked), *_lines_with_calls(client, messages, asked)):
        call = reply.message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("look", {"at": "the mill"})
    back = [
        *messages,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": "x"}}}]},
        {"role": "tool", "content": "a wheel", "tool_name": "look"},
    ]
    assert "a wheel" in client.chat("echo", back, options={"num_predict": 400}).message.content


def _lines_with_calls(client, messages, asked):
    """The last one is cut: it is not shown."""
    lines = [part for part in client.chat("echo", messages, stream=True, **asked) if part.message.tool_calls]
    assert lines
    return lines


def test_thinking_is_told_apart():
    pieces = [AnswerPiece(PieceKind.REASONING, "hm"), AnswerPiece(PieceKind.TEXT, "yes")]
    counts = {"text": "", "token_ids": [1], "num_prompt_tokens": 1, "num_cached_tokens": 0}
    outputs = [TextOutput(id="a", finish_reason=None, answer=[piece], **counts) for piece in pieces]
    whole = TextOutput(id="a", finish_reason=FinishReason.STOP, answer=pieces, **counts)
    document = json.loads(LineWriter("m", is_chat=True).document({0: whole}, UsageCounter(1)))
    assert document["message"] == {"role": "assistant", "content": "yes", "thinking": "hm"}
    writer = LineWriter("m", is_chat=False)
    told = [json.loads(writer.events(0, output, UsageCounter(1))) for output in outputs]
    assert [(line["response"], line.get("thinking")) for line in told] == [("", "hm"), ("yes", None)]
    assert json.loads(writer.ping)["response"] == ""
    assert json.loads(writer.failure(InvalidRequest("so it is"))) == {"error": "so it is"}


def test_a_model_that_cannot_think_says_so(echo_server):
    body = {"model": "echo", "messages": HELLO, "think": True, "stream": False}
    reply = echo_server.post("/api/chat", body)
    assert (reply.status_code, reply.json()) == (400, {"error": "'echo' does not support thinking"})
    assert echo_server.post("/api/chat", body | {"think": False, "options": FEW}).status_code == 200
    reply = echo_server.post("/api/chat", body | {"think": None, "tools": [LOOK]})
    assert (reply.status_code, reply.json()) == (400, {"error": "'echo' does not support tools"})


def test_log_probabilities_have_ollamas_form(server):
    body = {"model": "echo", "prompt": "hello", "raw": True, "stream": False, "options": {"num_predict": 3}}
    shown = server.post("/api/generate", body | {"logprobs": True, "top_logprobs": 2}).json()["logprobs"]
    assert "hello".startswith("".join(entry["token"] for entry in shown))
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in shown)


def test_vectors(client):
    one = client.embed("echo", "hello")
    many = client.embed("echo", ["hello", "world"])
    assert many.embeddings[0] == one.embeddings[0]
    assert len(many.embeddings) == 2
    assert many.prompt_eval_count > one.prompt_eval_count > 0
    assert client.embeddings("echo", "hello").embedding == one.embeddings[0]


def test_the_model_is_listed_and_described(server, client):
    (model,) = client.list().models
    assert (model.model, len(model.digest)) == ("echo:latest", 64)
    (loaded,) = client.ps().models
    assert loaded.context_length == server.http.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    shown = client.show("echo")
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.template
    assert any(key.endswith(".context_length") for key in shown.modelinfo)
    assert client.pull("echo").status == "success"
    assert [step.status for step in client.pull("echo:latest", stream=True)][-1] == "success"
    assert server.http.head(f"{server.url}/").status_code == 200
    assert server.http.get(f"{server.url}/api/version").json()["version"]


def test_a_request_for_nothing_says_that_the_model_is_loaded(server, client):
    assert client.generate("echo", keep_alive="5m").done_reason == "load"
    assert client.chat("echo", keep_alive=-1).done_reason == "load"
    reply = server.post("/api/generate", {"model": "echo", "keep_alive": 0})
    assert (reply.status_code, reply.json()["error"][:12]) == (400, "keep_alive 0")


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("chat", {"model": "other", "messages": HELLO}, 404, "model 'other' not found"),
        ("chat", {"messages": HELLO}, 400, "model is required"),
        ("chat", {"model": "echo", "messages": [{"role": "sage", "content": "x"}]}, 400, "messages[0].role"),
        ("chat", {"model": "echo", "messages": [{"role": "user", "content": ["x"]}]}, 400, "messages[0].content"),
        ("chat", {"model": "echo", "messages": HELLO, "keep_alive": "soon"}, 400, "keep_alive"),
        ("chat", {"model": "echo", "messages": HELLO, "format": "xml"}, 400, "format"),
        ("chat", {"model": "echo", "messages": HELLO, "think": "hard"}, 400, "think"),
        ("chat", {"model": "echo", "messages": [HELLO[0] | {"tool_calls": [{}]}]}, 400, "messages[0].tool_calls[0]"),
        ("generate", {"model": "echo", "prompt": "x", "context": [1, 2]}, 400, "context"),
        ("embed", {"model": "echo"}, 400, "input is missing"),
        ("pull", {"model": "other"}, 404, "model 'other' not found"),
        ("create", {"model": "mine"}, 400, "create"),
        ("copy", {"source": "echo", "destination": "b"}, 400, "copy"),
    ],
)
def test_a_bad_request_gets_a_sentence(server, path, body, status, says):
    reply = server.post(f"/api/{path}", body)
    assert reply.status_code == status
    assert set(reply.json()) == {"error"}
    assert says in reply.json()["error"]
