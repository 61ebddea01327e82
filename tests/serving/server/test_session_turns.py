"""Sessions keep the same of an answer whether it is streamed or comes as a whole."""

import asyncio

import pytest

from tests.serving.server.test_app import make_context
from tokenmill.core.answer import AnswerPiece, PieceKind
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.serving.frontend.chat_messages import normalize_messages
from tokenmill.serving.frontend.generation import merge
from tokenmill.serving.server.generation.call import GenerationCall
from tokenmill.serving.server.openai.chat_choices import ChatChoices
from tokenmill.serving.server.openai.chunks import PromptShown
from tokenmill.serving.server.openai.completions import TextChoices
from tokenmill.serving.server.openai.session_turns import ChatTurn, TextTurn

ASKED = [{"role": "user", "content": "where?"}]
PIECES = [
    [AnswerPiece(PieceKind.REASONING, "let me ")],
    [AnswerPiece(PieceKind.REASONING, "think"), AnswerPiece(PieceKind.TEXT, "I lo")],
    [AnswerPiece(PieceKind.TEXT, "ok"), AnswerPiece(PieceKind.CALL, '{"at":', "look")],
    [AnswerPiece(PieceKind.CALL, ' "x"}'), AnswerPiece(PieceKind.CALL, "{}", "look")],
]


def outputs():
    last = len(PIECES) - 1
    return [
        TextOutput("a", "", [number], 9, 0, FinishReason.STOP if number == last else None, answer=pieces)
        for number, pieces in enumerate(PIECES)
    ]


async def kept_of(is_streamed):
    context = make_context()
    session = context.sessions.open("", "chat")
    turn = ChatTurn(context, session, GenerationCall(params={}, messages=ASKED), ChatChoices())
    await turn.prompts()
    if is_streamed:
        for output in outputs():
            turn.chunk_choices(0, output)
    else:
        turn.choice(0, merge(outputs()))
    turn.keep()
    session.close()
    assert session.num_bytes > 0
    return session.messages


def test_thinking_text_and_calls_are_kept_as_the_client_got_them():
    streamed, whole = asyncio.run(kept_of(True)), asyncio.run(kept_of(False))
    ids = [{call.pop("id") for call in messages[-1]["tool_calls"]} for messages in (streamed, whole)]
    assert [len(each) for each in ids] == [2, 2]
    assert streamed == whole
    assert streamed[0] == ASKED[0]
    answer = normalize_messages(streamed)[-1]
    assert (answer["content"], answer["reasoning_content"]) == ("I look", "let me think")
    assert [call["function"]["arguments"] for call in answer["tool_calls"]] == [{"at": "x"}, {}]


@pytest.mark.parametrize(
    ("reason", "stopped_by", "num_kept"),
    [("stop", None, 2), ("stop", 7, 2), ("stop", "end", 3), ("length", None, 3), ("abort", None, 3)],
)
def test_tokens_that_end_a_text_are_not_kept_and_those_of_a_stop_string_are(reason, stopped_by, num_kept):
    async def scenario():
        context = make_context()
        session = context.sessions.open("", "text")
        choices = TextChoices(PromptShown(False, False))
        turn = TextTurn(context, session, GenerationCall(params={}, prompts=[[1, 2]]), choices)
        await turn.prompts()
        turn.chunk_choices(0, TextOutput("a", "x", [5], 2, 0))
        turn.chunk_choices(0, TextOutput("a", "y", [6, 7], 2, 0, FinishReason(reason), stopped_by))
        turn.keep()
        session.close()
        return session.token_ids

    assert asyncio.run(scenario()) == [1, 2, 5, 6, 7][: 2 + num_kept]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"params": {"n": 2}}, "n"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"template_kwargs": {"continue_final_message": True}}, "continue_final_message"),
        ({"template_kwargs": {"add_generation_prompt": False}}, "add_generation_prompt"),
    ],
)
def test_what_a_session_does_not_have_is_refused_by_name(fields, param):
    async def scenario():
        context = make_context()
        session = context.sessions.open("", "chat")
        try:
            ChatTurn(context, session, GenerationCall(**{"params": {}, "messages": ASKED} | fields), ChatChoices())
        finally:
            session.close()

    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(scenario())
    assert refused.value.param == param
