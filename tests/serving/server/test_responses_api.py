"""/v1/responses with OpenAI's own client, against the stub engine, which repeats the prompt."""

import openai
import pytest

from tests.eventually import eventually
from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, write_folder
from tests.serving.server.asked_responses import create
from tests.serving.server.running_server import start_server
from tokenmill.config.configs import EngineConfig
from tokenmill.core.answer import AnswerPiece, PieceKind
from tokenmill.core.messages import TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.serving.server.generation.writer import UsageCounter
from tokenmill.serving.server.openai.response_events import ResponseWriter

TOOLS = [
    {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the mill"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """5 ms a token, and many of them, so that what runs in the background can be looked at."""
    stub = {"step_seconds": 0.005, "max_model_len": 10_000}
    folder = write_folder(tmp_path_factory.mktemp("models") / "echo", byte_level_tokenizer(), config={"stub": stub})
    parsers = {"tool_call_parser": "hermes", "enable_auto_tool_choice": True}
    with start_server(EngineConfig(model=str(folder)), **parsers) as running:
        yield running


def chat_text(server, messages, num_tokens):
    reply = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": num_tokens}).json()
    return reply["choices"][0]["message"]["content"]


def test_an_answer_is_the_same_as_by_the_other_api(server, responses):
    response = create(responses)
    assert response.output_text == chat_text(server, [{"role": "user", "content": "hello there"}], 12)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    usage = response.usage
    assert usage.output_tokens == 12
    assert usage.input_tokens + 12 == usage.total_tokens
    assert usage.input_tokens_details.cached_tokens > 0
    content = [{"type": "input_text", "text": text} for text in ("hello", "you")]
    parts = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": content}]
    same = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello\nyou"}]
    assert create(responses, input=parts).output_text == chat_text(server, same, 12)
    named = create(responses, input="hello\nyou", instructions="be brief")
    assert named.output_text == chat_text(server, same, 12)


def test_each_token_of_a_text_has_its_log_probability_in_both_forms(server, responses):
    fields = {"input": "so " + CALL + "and on", "tools": TOOLS, "max_output_tokens": 90, "top_logprobs": 2}
    fields["include"] = ["message.output_text.logprobs"]
    whole = create(responses, **fields)
    assert [item.type for item in whole.output] == ["message", "function_call"]
    (part,) = whole.output[0].content
    assert "".join(token.token for token in part.logprobs) == part.text
    assert {len(token.top_logprobs) for token in part.logprobs} == {2}
    assert bytes(byte for token in part.logprobs for byte in token.bytes).decode() == part.text
    events = list(create(responses, **fields, stream=True))
    told = [token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
    texts = [item.content[0] for item in events[-1].response.output if item.type == "message"]
    assert [token.token for token in told] == [token.token for text in texts for token in text.logprobs]
    assert ["".join(token.token for token in text.logprobs) for text in texts] == [text.text for text in texts]
    assert [token.logprob for token in told] == [token.logprob for token in part.logprobs]
    done = [event for event in events if event.type == "response.output_text.done"]
    assert [len(event.logprobs) for event in done] == [len(text.logprobs) for text in texts]
    reply = create(responses, input="hi", include=fields["include"])
    assert {len(token.top_logprobs) for token in reply.output[0].content[0].logprobs} == {0}
    assert not create(responses, input="hi").output[0].content[0].logprobs


def test_a_stream_brings_the_same_response(responses):
    events = list(create(responses, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert text == final.output_text == create(responses).output_text
    assert responses.retrieve(final.id).output_text == text, "stored as well"


def test_what_was_cut_off_is_told_in_its_item(responses):
    cut = create(responses)
    assert cut.output[-1].status == "incomplete"
    *_, done, end = create(responses, stream=True)
    assert (done.type, done.item.status) == ("response.output_item.done", "incomplete")
    assert done.item == end.response.output[-1]
    assert responses.retrieve(cut.id).output == cut.output


@pytest.mark.parametrize(("reason", "status"), [(FinishReason.STOP, "completed"), (FinishReason.LENGTH, "incomplete")])
def test_only_the_last_item_can_be_incomplete(reason, status):
    kept = []
    writer = ResponseWriter({}, kept.append)
    answer = [AnswerPiece(PieceKind.REASONING, "so"), AnswerPiece(PieceKind.TEXT, "well")]
    output = TextOutput("x", "", [1, 2, 3, 4], 5, 0, reason, answer=answer, num_reasoning_tokens=3)
    usage = UsageCounter(1)
    usage.add(0, output)
    writer.document({0: output}, usage)
    (response,) = kept
    items = [(item["type"], item["status"], item["content"][0]["text"]) for item in response["output"]]
    assert items == [("reasoning", "completed", "so"), ("message", status, "well")]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}


def test_the_events_of_a_stored_response_are_gone_and_that_is_said(responses):
    stored = create(responses)
    with pytest.raises(openai.BadRequestError) as refused:
        responses.retrieve(stored.id, stream=True)
    assert refused.value.param == "stream"
    with pytest.raises(openai.BadRequestError):
        responses.retrieve(stored.id, include=["message.output_text.logprobs"])
    assert responses.retrieve(stored.id, stream=False).id == stored.id


def test_a_call_is_an_item_of_its_own_also_in_a_stream(responses):
    fields = {"input": "so " + CALL, "tools": TOOLS, "max_output_tokens": 70}
    whole = create(responses, **fields)
    assert [item.type for item in whole.output][:2] == ["message", "function_call"]
    call = whole.output[1]
    assert (call.name, call.arguments.replace(" ", "")) == ("look", '{"at":"themill"}')
    events = list(create(responses, stream=True, **fields))
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert arguments == call.arguments
    assert [item.type for item in events[-1].response.output] == [item.type for item in whole.output]


def test_the_result_of_a_call_goes_back(server, responses):
    given = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "it"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a mill"},
    ]
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    same = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "a mill"},
    ]
    assert create(responses, input=given, max_output_tokens=30).output_text == chat_text(server, same, 30)


def test_a_response_continues_another(server, responses):
    first = create(responses)
    second = create(responses, input="and now", previous_response_id=first.id, max_output_tokens=80)
    messages = [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and now"},
    ]
    assert second.output_text == chat_text(server, messages, 80)
    assert second.previous_response_id == first.id
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        create(responses, previous_response_id="resp_unknown")


def wait_until(responses, response_id, condition):
    found = []

    def is_so():
        found[:] = [responses.retrieve(response_id)]
        return condition(found[0])

    eventually(is_so, lambda: found)
    return found[0]


def test_in_the_background_and_looked_at_later(responses):
    response = create(responses, background=True)
    assert response.status == "queued"
    done = wait_until(responses, response.id, lambda response: response.status != "queued")
    assert (done.status, done.output_text) == ("incomplete", create(responses).output_text)


def test_a_response_in_the_background_is_cancelled(server, responses):
    response = create(responses, background=True, max_output_tokens=9000)
    server.wait_for(lambda: server.metric("num_requests_running") == 1)
    assert server.http.get(f"{server.url}/v1/requests/{response.id}").status_code == 200
    cancelled = responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert responses.retrieve(response.id).status == "cancelled"
    server.wait_until_unused()
    with pytest.raises(openai.BadRequestError):
        responses.cancel(create(responses).id)


def test_a_failure_in_the_background_is_kept(responses):
    response = create(responses, background=True, input="hello " * 2000)
    failed = wait_until(responses, response.id, lambda response: response.status != "queued")
    assert failed.status == "failed"
    assert "context length" in failed.error.message


def test_what_is_deleted_or_not_stored_is_gone(responses):
    kept, not_stored = create(responses), create(responses, store=False)
    responses.delete(kept.id)
    for response_id in (kept.id, not_stored.id, "resp_x", kept.id[:-1]):
        with pytest.raises(openai.NotFoundError):
            responses.retrieve(response_id)


@pytest.mark.parametrize(
    "fields",
    [
        {"input": []},
        {"input": [{"role": "tool", "content": "x"}]},
        {"input": [{"role": "user"}]},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "function_call_output", "output": "x"}]},
        {"tools": [{"type": "function"}]},
        {"tool_choice": {"type": "file_search"}, "tools": TOOLS},
        {"text": {"format": {"type": "json_schema", "name": "x"}}},
        {"truncation": "some"},
        {"extra_body": {"top_logprobs": 21}},
        {"conversation": "x"},
        {"background": True, "stream": True},
        {"temperature": 3},
        {"max_output_tokens": 0},
    ],
)
def test_what_cannot_be_answered_is_refused(responses, fields):
    with pytest.raises(openai.BadRequestError):
        create(responses, **fields)
