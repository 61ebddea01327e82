"""Continue sessions by chats and texts: the prompt of a turn, and what the session keeps of its answer.

A chat is kept as messages and rendered anew in each turn, as its template wants earlier turns to look. A text is kept
as tokens: the next turn begins with exactly those that the model had and wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.core.messages import GenerateText, TextOutput
from tokenmill.core.request import FinishReason
from tokenmill.core.text_queries import EncodeText
from tokenmill.serving.server.context import ServerContext
from tokenmill.serving.server.generation.call import GenerationCall, messages_of
from tokenmill.serving.server.openai.chat_choices import ROLE, ChatChoices, ChatDelta, ChatMessage
from tokenmill.serving.server.openai.chunks import ChoiceEncoder
from tokenmill.serving.server.session_store import TOKEN_BYTES, Session


class ChatTurn:
    """A `Continuation` by messages, and the `ChoiceEncoder` of its answer, which it listens to."""

    def __init__(self, context: ServerContext, session: Session, call: GenerationCall, choices: ChatChoices) -> None:
        """
        Raises:
            InvalidRequest: the call asks for something that a session does not have.
        """
        _check(call)
        for name in ("add_generation_prompt", "continue_final_message"):
            if name in call.template_kwargs:
                raise InvalidRequest(f"a session has no {name}: its turns are whole messages", name)
        self._context = context
        self._session = session
        self._call = call
        self._choices = choices
        self._num_bytes = 0
        self._text = self._reasoning = ""
        self._tool_calls: list[dict[str, Any]] = []

    async def prompts(self) -> Sequence[GenerateText]:
        """Return the prompt of the whole conversation."""
        session, added = self._session, self._call.messages or []
        self._num_bytes = len(msgspec.json.encode(added))
        session.check_room(self._num_bytes)
        whole = msgspec.structs.replace(self._call, messages=[*session.messages, *added])
        threads = self._context.bodies.threads
        return await threads.run(session.num_bytes + self._num_bytes, lambda: messages_of(whole, self._context))

    def keep(self) -> None:
        """Add the messages and the answer to the session."""
        answer: dict[str, Any] = {"role": ROLE, "content": self._text}
        if self._reasoning:
            answer["reasoning_content"] = self._reasoning
        if self._tool_calls:
            answer["tool_calls"] = self._tool_calls
        messages = [*(self._call.messages or []), answer]
        num_bytes = self._num_bytes + len(msgspec.json.encode(answer))
        self._context.sessions.keep_messages(self._session, messages, num_bytes)

    def chunk_choices(self, index: int, output: TextOutput) -> list[Any]:
        """Return the choices of `ChatChoices`."""
        chunks = self._choices.chunk_choices(index, output)
        for chunk in chunks:
            self._add(chunk.delta)
        return chunks

    def choice(self, index: int, output: TextOutput) -> Any:
        """Return the choice of `ChatChoices`."""
        choice = self._choices.choice(index, output)
        self._take(choice.message)
        return choice

    def _add(self, delta: ChatDelta) -> None:
        self._text += delta.content or ""
        self._reasoning += delta.reasoning or ""
        for call in delta.tool_calls or ():
            if call.index == len(self._tool_calls):
                function = {"name": call.function.name or "", "arguments": ""}
                self._tool_calls.append({"id": call.id, "type": "function", "function": function})
            self._tool_calls[call.index]["function"]["arguments"] += call.function.arguments

    def _take(self, message: ChatMessage) -> None:
        self._text = message.content or ""
        self._reasoning = message.reasoning or ""
        self._tool_calls = [msgspec.to_builtins(call) for call in message.tool_calls or ()]


class TextTurn:
    """A `Continuation` by text or token ids, and the `ChoiceEncoder` of its answer, which it listens to."""

    def __init__(self, context: ServerContext, session: Session, call: GenerationCall, choices: ChoiceEncoder) -> None:
        """
        Raises:
            InvalidRequest: the call asks for something that a session does not have.
        """
        _check(call)
        if len(call.prompts) != 1 or not isinstance(call.prompts[0], str | list):
            raise InvalidRequest("a turn of a session has one prompt, without a suffix", "prompt")
        self._prompt = call.prompts[0]
        self._context = context
        self._session = session
        self._call = call
        self._choices = choices
        self._prompt_ids: list[int] = []
        self._token_ids: list[int] = []

    async def prompts(self) -> Sequence[GenerateText]:
        """Return the prompt: the tokens of all turns, and this input's behind them."""
        session, added = self._session, self._prompt
        session.check_room(TOKEN_BYTES * len(added))
        if isinstance(added, str):
            # What begins a text, such as BOS, stands at its beginning only.
            begins = self._call.add_special_tokens is not False and not session.token_ids
            added = (
                await self._context.client.encode(EncodeText(id="", text=added, add_special_tokens=begins))
            ).token_ids
        self._prompt_ids = [*session.token_ids, *added]
        return messages_of(msgspec.structs.replace(self._call, prompts=[self._prompt_ids]), self._context)

    def keep(self) -> None:
        """Let the session have these tokens."""
        self._context.sessions.keep_tokens(self._session, [*self._prompt_ids, *self._token_ids])

    def chunk_choices(self, index: int, output: TextOutput) -> list[Any]:
        """Return the choices of the encoder."""
        self._add(output)
        return self._choices.chunk_choices(index, output)

    def choice(self, index: int, output: TextOutput) -> Any:
        """Return the choice of the encoder."""
        self._add(output)
        return self._choices.choice(index, output)

    def _add(self, output: TextOutput) -> None:
        ended_by_token = output.finish_reason is FinishReason.STOP and not isinstance(output.stop_reason, str)
        is_shown = not ended_by_token or self._call.params.get("include_stop_str_in_output")
        self._token_ids += output.token_ids if is_shown else output.token_ids[:-1]


def _check(call: GenerationCall) -> None:
    """Refuse what several continuations, or a prompt that is not all there, would make of a session."""
    if (call.params.get("n") or 1) > 1:
        raise InvalidRequest("a turn of a session has one answer: n must be 1", "n")
    if call.truncate_prompt_tokens is not None:
        raise InvalidRequest("a session is not cut: it has no truncate_prompt_tokens", "truncate_prompt_tokens")
    if call.is_score:
        raise InvalidRequest("a turn of a session has an answer: max_tokens must be at least 1", "max_tokens")
