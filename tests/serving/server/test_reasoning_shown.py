"""`include_reasoning`: what a client does not want to see of the thinking."""

import pytest

from tokenmill.core.answer import AnswerPiece, PieceKind
from tokenmill.core.messages import TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.serving.server.openai.chat_choices import ChatChoices

PIECES = [AnswerPiece(PieceKind.REASONING, "hm"), AnswerPiece(PieceKind.TEXT, "yes")]


def output(pieces, reason=None):
    return TextOutput(
        id="a", text="", token_ids=[1], num_prompt_tokens=1, num_cached_tokens=0, finish_reason=reason, answer=pieces
    )


@pytest.mark.parametrize("is_shown", [True, False])
def test_thinking_is_left_out_where_it_is_not_wanted(is_shown):
    whole = ChatChoices(shows_reasoning=is_shown).choice(0, output(PIECES, FinishReason.STOP))
    assert whole.message.content == "yes"
    assert bool(whole.message.reasoning) is bool(whole.message.reasoning_content) is is_shown
    stream = ChatChoices(shows_reasoning=is_shown)
    chunks = [chunk for piece in PIECES for chunk in stream.chunk_choices(0, output([piece]))]
    chunks += stream.chunk_choices(0, output([PIECES[0]]))
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "yes"
    assert sum(bool(chunk.delta.reasoning) for chunk in chunks) == 2 * is_shown
    assert len(chunks) == (3 if is_shown else 2), "a delta that brings nothing is not sent"
