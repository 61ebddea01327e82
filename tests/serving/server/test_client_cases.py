"""Try what clients send and others take: ids beyond the model's, nulls everywhere, whole contexts, our replies."""

from __future__ import annotations

import inspect
import json
import random
import typing
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.seeding import seed_for
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE
from tokenmill.serving.server.anthropic.body import MessagesBody, PromptBody
from tokenmill.serving.server.generation.tokens import DetokenizeBody, TokenizeBody
from tokenmill.serving.server.openai.batches import BatchBody
from tokenmill.serving.server.openai.chat import ChatBody
from tokenmill.serving.server.openai.completions import TextBody
from tokenmill.serving.server.openai.embeddings import EmbeddingBody
from tokenmill.serving.server.openai.responses_body import ResponsesBody
from tokenmill.serving.server.operators.adapters import LoadAdapterBody, UnloadAdapterBody
from tokenmill.serving.server.operators.admin import AbortBody
from tokenmill.serving.server.operators.engines import WeightsBody
from tokenmill.serving.server.sglang.generate import NativeBody

SEED = seed_for(__name__)
CONTEXT = 64
# As some templates of the wild: they add contents, and go through the arguments of a call by name.
TEMPLATE = (
    "{% if enable_thinking is false %}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
    "{% for name, value in call.function.arguments|items %} {{ name }}={{ value }}{% endfor %}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOL = {
    "type": "object",
    "properties": {"city": {"type": "string", "pattern": "^(?=.*\\d).{4}$"}},
    "required": ["city"],
}
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its tokenizer has more tokens than the model, as that of Gemma 3, and adds a first token to texts."""
    folder = make_checkpoint(tmp_path_factory.mktemp("cases") / "odd", "qwen3")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    spare = [AddedToken(f"<spare{i}>", special=True) for i in range(VOCAB_SIZE - tokenizer.get_vocab_size())]
    tokenizer.add_special_tokens([*spare, AddedToken("<new>", special=True)])
    tokenizer.add_tokens(["</think>"])
    assert tokenizer.token_to_id("<new>") == VOCAB_SIZE
    bos = "<|endoftext|>"
    tokenizer.post_processor = TemplateProcessing(f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))])
    tokenizer.save(str(folder / "tokenizer.json"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bos_token": bos, "chat_template": TEMPLATE}))
    for name in ("chat_template.jinja",):
        (folder / name).unlink(missing_ok=True)
    return folder


@pytest.fixture(scope="module")
def server(model):
    engine = EngineConfig(model=str(model), max_model_len=CONTEXT, page_size=16, num_pages=400)
    options = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    with start_server(engine, ENGINE_MODULE, **options) as running:
        print(f"seed {SEED}")
        yield running


# --- ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wishes",
    [
        {"bad_words": ["<new>"]},
        {"bad_words": ["fine", "a <new> b"]},
        {"logit_bias": {str(VOCAB_SIZE): 1}},
        {"stop_token_ids": [VOCAB_SIZE]},
        {"allowed_token_ids": [1, VOCAB_SIZE]},
        {"prompt": "a <new>"},
        {"prompt": [1, VOCAB_SIZE]},
        {"prompt": ["fine", "</think>"]},
    ],
)
def test_an_id_beyond_the_model_is_refused_and_harms_nobody(server, wishes):
    others = {"prompt": "hi", "max_tokens": 30, "ignore_eos": True}
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(server.post, "/v1/completions", others) for _ in range(3)]
        refused = server.post("/v1/completions", {"prompt": "hi", "max_tokens": 5} | wishes)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == next(iter(wishes))
        assert [one.result().status_code for one in running] == [200] * 3


@pytest.mark.parametrize(
    ("outputs", "is_right"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        ({"structured_outputs": {"json": {"enum": [12, "a"]}}}, lambda text: json.loads(text) in (12, "a")),
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, lambda text: len(text) == 3 and set(text) <= set("abc")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"grammar": 'start: "x" | "yz"'}}, lambda text: text in ("x", "yz")),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_grammars_work_with_more_tokens_than_the_model_has(server, path, outputs, is_right):
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": HELLO}
    for seed in range(4):
        reply = server.post(path, prompt | outputs | {"max_tokens": 40, "seed": seed, "temperature": 1.0})
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert choice["finish_reason"] == "length" or is_right(text), text


# --- texts -------------------------------------------------------------------------------------------------------


def user(content):
    return {"role": "user", "content": content}


def raw(server, path, body):
    return server.http.post(f"{server.url}{path}", content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize(
    "cut", [r"cut \ud83d", r"\ude00 cut", r"\ud83d\ud83d\ude00", r"a \\\ud83d b", r"\\ud83d\udc00"]
)
def test_half_a_character_anywhere_is_a_replacement(server, cut):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "INNER"}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    chats = [
        [user("CUT")],
        [user([{"type": "text", "text": "CUT"}])],
        [*HELLO, said, {"role": "tool", "content": "CUT"}],
    ]
    bodies: list[tuple[str, dict[str, Any]]] = [
        *[("/v1/chat/completions", {"messages": messages, "max_tokens": 1}) for messages in chats],
        ("/v1/completions", {"prompt": "CUT", "max_tokens": 1, "stop": ["CUT"]}),
        ("/v1/responses", {"input": "CUT", "instructions": "CUT", "max_output_tokens": 1}),
        ("/v1/messages", {"model": "odd", "max_tokens": 1, "messages": [user("CUT")]}),
        ("/v1/embeddings", {"input": ["CUT"]}),
        ("/generate", {"text": "CUT", "sampling_params": {"max_new_tokens": 1}}),
        ("/tokenize", {"prompt": "CUT", "add_special_tokens": False}),
    ]
    for path, body in bodies:
        text = json.dumps(body).replace("CUT", cut).replace("INNER", cut.replace("\\", "\\\\"))
        reply = raw(server, path, text.encode())
        assert reply.status_code == 200, (path, reply.text)
    text = server.post("/detokenize", {"tokens": reply.json()["tokens"]}).json()["prompt"]
    expected = json.loads(f'"{cut}"').encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert text == expected


# --- our own replies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", ['{"city": "Os', "", "[1", "{}}", '{"a":' + "[" * 90, "Oslo", '"Oslo"', "null", "3"]
)
def test_a_call_that_was_cut_is_taken_as_text(server, arguments):
    call = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "reasoning": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "none"}
    assert server.post("/tokenize", {"messages": [*HELLO, answer, result]}).status_code == 200
    item = {"type": "function_call", "call_id": "call_1", "name": "find", "arguments": arguments}
    outcome = {"type": "function_call_output", "call_id": "call_1", "output": "none"}
    use = {"type": "tool_use", "id": "c", "name": "find", "input": arguments}
    found = {"type": "tool_result", "tool_use_id": "c", "content": "none"}
    blocks = [*HELLO, {"role": "assistant", "content": [use]}, user([found])]
    for path, body in (
        ("/v1/responses", {"input": [{"role": "user", "content": "hi"}, item, outcome], "max_output_tokens": 1}),
        ("/v1/messages", {"model": "odd", "messages": blocks, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"model": "odd", "messages": blocks}),
    ):
        reply = server.post(path, body)
        is_too_long = len(arguments) > 40 and "maximum context length" in reply.text
        assert reply.status_code == 200 or is_too_long, (path, reply.text)


def test_a_conversation_goes_on_behind_our_own_cut_reply(server):
    tools = [{"type": "function", "function": {"name": "f", "parameters": TOOL}}]
    for most in (1, 6, 14, 20):
        wanted = {"messages": HELLO, "tools": tools, "tool_choice": "required", "max_tokens": most}
        reply = server.post("/v1/chat/completions", wanted)
        assert reply.status_code == 200, reply.text  # whatever the grammar of a tool does not support is left out
        message = reply.json()["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in calls]
        again = server.post("/tokenize", {"messages": [*HELLO, message, *results]})
        assert again.status_code == 200, again.text


# --- fields ------------------------------------------------------------------------------------------------------

BODIES: dict[type, dict[str, Any]] = {
    ChatBody: {"messages": HELLO}, TextBody: {"prompt": "hi"}, EmbeddingBody: {"input": "hi"},
    ResponsesBody: {"input": "hi"}, MessagesBody: {"model": "odd", "messages": HELLO, "max_tokens": 1},
    PromptBody: {"model": "odd", "messages": HELLO}, TokenizeBody: {"prompt": "hi"}, DetokenizeBody: {"tokens": [1]},
    NativeBody: {"text": "hi"}, AbortBody: {}, WeightsBody: {}, LoadAdapterBody: {}, UnloadAdapterBody: {},
    BatchBody: {},
}  # fmt: skip
PATHS = {
    ChatBody: "/v1/chat/completions", TextBody: "/v1/completions", EmbeddingBody: "/v1/embeddings",
    ResponsesBody: "/v1/responses", MessagesBody: "/v1/messages", PromptBody: "/v1/messages/count_tokens",
    TokenizeBody: "/tokenize", DetokenizeBody: "/detokenize", NativeBody: "/generate",
}  # fmt: skip


def structs_in(kind: Any, seen: set[type]) -> set[type]:
    """The structs that a type holds."""
    if inspect.isclass(kind) and issubclass(kind, msgspec.Struct) and kind not in seen:
        seen.add(kind)
        for hint in typing.get_type_hints(kind).values():
            structs_in(hint, seen)
    for inner in typing.get_args(kind):
        structs_in(inner, seen)
    return seen


def test_null_is_the_default_of_every_field_that_has_one():
    kinds: set[type] = set()
    for body in BODIES:
        structs_in(body, kinds)
    assert len(kinds) > 20
    for kind in kinds:
        hints = typing.get_type_hints(kind, include_extras=False)
        for field in msgspec.structs.fields(kind):
            if not field.required:
                hint = hints[field.name]
                takes_null = hint is Any or hint is type(None) or type(None) in typing.get_args(hint)
                assert takes_null, f"{kind.__name__}.{field.name}: {hint}"


@pytest.mark.parametrize("kind", PATHS, ids=PATHS.values())
def test_a_body_full_of_nulls_is_answered_as_one_without(server, kind):
    nulls = {field.name: None for field in msgspec.structs.fields(kind) if field.name not in BODIES[kind]}
    few = {"max_tokens": 2} if kind in (ChatBody, TextBody) else {}
    few = {"max_output_tokens": 2} if kind is ResponsesBody else few
    reply = server.post(PATHS[kind], nulls | BODIES[kind] | few)
    assert reply.status_code == 200, reply.text
    for name in nulls.keys() - few.keys():
        reply = server.post(PATHS[kind], {name: None} | BODIES[kind] | few)
        assert reply.status_code == 200, (name, reply.text)


def test_nulls_inside_of_what_is_free(server):
    reply = server.post(
        "/v1/responses",
        {
            "input": [{"type": None, "role": "user", "content": "hi", "id": None, "status": None}],
            "text": {"format": {"type": "text", "name": None, "schema": None, "strict": None}, "verbosity": None},
            "max_output_tokens": 1,
        },
    )
    assert reply.status_code == 200, reply.text
    format = {"type": "json_schema", "json_schema": {"name": None, "schema": {"type": "boolean"}, "strict": None}}
    body = {"messages": HELLO, "response_format": format, "max_tokens": 8, "stream_options": None}
    assert server.post("/v1/chat/completions", body).status_code == 200


def test_a_json_object_may_have_a_schema(server):
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    format = {"type": "json_object", "schema": schema}
    unthinking = {"temperature": 0, "chat_template_kwargs": {"enable_thinking": False}}
    chat = server.post(
        "/v1/chat/completions", {"messages": HELLO, "response_format": format, "max_tokens": 40} | unthinking
    )
    assert json.loads(chat.json()["choices"][0]["message"]["content"]) == {"n": 7}, chat.text
    asked = {"prompt": "x", "response_format": format, "max_tokens": 40, "temperature": 0}
    assert json.loads(server.post("/v1/completions", asked).json()["choices"][0]["text"]) == {"n": 7}
    asked = {"input": "x", "text": {"format": format}, "max_output_tokens": 40} | unthinking
    reply = server.post("/v1/responses", asked).json()
    assert json.loads(reply["output"][-1]["content"][0]["text"]) == {"n": 7}, reply


# --- lengths and first tokens ------------------------------------------------------------------------------------


def test_a_prompt_may_fill_the_context_where_no_output_is_needed(server):
    whole, over = [5] * CONTEXT, [5] * (CONTEXT + 1)
    for prompt, status in ((whole, 200), (over, 400)):
        for pooling in ("mean", "last"):
            assert server.post("/v1/embeddings", {"input": prompt, "pooling": pooling}).status_code == status
        for logprobs in (None, 0, 1):
            body = {"prompt": prompt, "echo": True, "max_tokens": 0, "logprobs": logprobs}
            reply = server.post("/v1/completions", body)
            assert reply.status_code == status, reply.text
            if status == 200:
                assert reply.json()["usage"]["prompt_tokens"] == CONTEXT
        assert server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).status_code == 400
    vector = server.post("/v1/embeddings", {"input": over, "truncate_prompt_tokens": -1}).json()
    assert vector["usage"]["prompt_tokens"] == CONTEXT
    assert server.post("/v1/completions", {"prompt": whole[1:], "max_tokens": 1}).status_code == 200
    assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}).status_code == 200


def test_an_embeddings_call_may_have_2048_inputs(server):
    rng = random.Random(SEED)
    inputs = [[rng.randrange(300)] for _ in range(2048)]
    data = server.post("/v1/embeddings", {"input": inputs}, timeout=300).json()["data"]
    assert [one["index"] for one in data] == [*range(2048)]
    assert server.post("/v1/embeddings", {"input": [*inputs, [1]]}).status_code == 400


def test_the_first_token_is_there_once_and_can_be_left_out(server):
    def count(path, **body):
        return server.post(path, body | ({"max_tokens": 1} if "completions" in path else {})).json()["usage"][
            "prompt_tokens"
        ]

    bare = server.post("/tokenize", {"prompt": "hi", "add_special_tokens": False}).json()["count"]
    for path, field in (("/v1/completions", "prompt"), ("/v1/embeddings", "input")):
        assert count(path, **{field: "hi"}) == bare + 1
        assert count(path, **{field: "<|endoftext|>hi"}) == bare + 1
        assert count(path, **{field: "<|endoftext|><|endoftext|>hi"}) == bare + 2
        assert count(path, **{field: "hi"}, add_special_tokens=False) == bare
        assert count(path, **{field: "<|endoftext|>hi"}, add_special_tokens=False) == bare + 1
    assert server.post("/tokenize", {"prompt": "<|endoftext|>hi"}).json()["count"] == bare + 1
    chat = count("/v1/chat/completions", messages=HELLO)
    assert count("/v1/chat/completions", messages=HELLO, add_special_tokens=False) == chat
    assert count("/v1/chat/completions", messages=HELLO, add_special_tokens=True) == chat + 1
    assert server.post("/tokenize", {"messages": HELLO, "add_special_tokens": True}).json()["count"] == chat + 1
