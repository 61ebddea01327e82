"""The whole logic of a text worker, without sockets: prompts to token ids, and token ids to text.

    GenerateText -> `prepare`, `start` -> AddRequest               (or RequestRejected)
    StepOutputs  -> detokenize, match stop strings, parse -> TextOutputs  (and AbortRequests after a stop string)

Each accepted request gets exactly one terminal `TextOutput`: once a stop string matched or the client aborted, later
outputs of the engine for that id are dropped. A request that cannot be handled, for whatever reason, ends alone.
Does not know HTTP, the scheduler or the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tokenmill.core.answer import AnswerPiece
from tokenmill.core.api_messages import PrefixChange
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import TokenMillError
from tokenmill.core.media import with_surrogates
from tokenmill.core.messages import (
    AbortRequests,
    AddRequest,
    GenerateText,
    PromptReport,
    RequestRejected,
    StepOutputs,
    TextMessage,
    TextOutput,
    TextOutputs,
    ToApi,
    ToEngine,
    TokenOutput,
)
from tokenmill.core.part_messages import EngineBack, EngineDraining, EngineLost
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.core.text_queries import DecodeTokens, EncodeText, FindParsers
from tokenmill.serving.frontend.answer_parser import AnswerParser, answer_parser
from tokenmill.serving.frontend.attempt import ANY_TIME, Attempt
from tokenmill.serving.frontend.chat_template import ChatTemplate
from tokenmill.serving.frontend.media_prompts import MediaPrompts
from tokenmill.serving.frontend.open_texts import OpenTexts
from tokenmill.serving.frontend.prefix_watch import PrefixWatch
from tokenmill.serving.frontend.prompt_processor import (
    Prepared,
    PreparedPrompt,
    PreparedTexts,
    PromptProcessor,
    Question,
    rejection,
)
from tokenmill.serving.frontend.prompt_reporter import PromptReporter, spellings
from tokenmill.serving.frontend.stop_strings import StopStrings
from tokenmill.serving.frontend.tokenizer import IncrementalDetokenizer, Tokenizer
from tokenmill.serving.frontend.tool_parsers import harmony


@dataclass(slots=True)
class Routed:
    """The messages that result from one message, by destination, each list in order."""

    to_engine: list[ToEngine] = field(default_factory=list)
    to_api: list[ToApi] = field(default_factory=list)


@dataclass(slots=True)
class _OpenRequest:
    """The state of a request between its `AddRequest` and its terminal output."""

    params: SamplingParams
    num_prompt_tokens: int
    detokenizer: IncrementalDetokenizer
    stop_strings: StopStrings
    num_output_tokens: int = 0
    reporter: PromptReporter | None = None
    parser: AnswerParser | harmony.HarmonyParser | None = None
    change: PrefixChange | None = None
    ending: Grammar | None = None


class _NewText(NamedTuple):
    """The new text of an output, or pieces of its parsed answer, and the stop string that ended it."""

    text: str
    answer: list[AnswerPiece] | None
    stop_string: str | None


class TextProcessor:
    """Translates messages between the API and the engine."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        worker: str = "",
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        any_whitespace: bool = True,
        max_string_length: int = 0,
        media: MediaPrompts | None = None,
        caches_prefixes: bool = True,
    ) -> None:
        """`eos_token_ids`: the model's own; a stop on one of them has no `stop_reason`.

        `worker`: the inbox to which the engine sends outputs.

        `any_whitespace`, `max_string_length`: see `GrammarBuilder`. `media`: see `PromptEncoder`.

        `caches_prefixes`: the engine has a prefix cache, which a changed prompt does not profit from.
        """
        self.tokenizer = tokenizer
        self._prompts = PromptProcessor(tokenizer, chat_template, any_whitespace, max_string_length, media)
        self._worker = worker
        self._eos_token_ids = eos_token_ids
        self._open: dict[str, _OpenRequest] = {}
        self._texts = OpenTexts(worker)
        self._watch = PrefixWatch(tokenizer, caches_prefixes)

    @property
    def num_open(self) -> int:
        """Number of requests that still wait for their terminal output."""
        return len(self._open) + len(self._texts)

    def process(self, message: TextMessage) -> Routed:
        """Handle one message; errors in what a client sent are never raised."""
        match message:
            case StepOutputs():
                return self._step_outputs(message)
            case AbortRequests():
                self._forget(message.ids)
                return Routed(to_engine=[message])
            case EngineReady():
                self._prompts.engine_ready(message)
                return Routed()
            case EngineLost() | EngineBack() | EngineDraining():
                return Routed()
            case GenerateText() | EncodeText() | DecodeTokens() | FindParsers():
                return self.start(message, self.prepare(message))

    def expect(self, request_id: str, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Accept the outputs of a request whose prompt was not prepared here."""
        self._open[request_id] = _OpenRequest(
            params=params,
            num_prompt_tokens=num_prompt_tokens,
            detokenizer=IncrementalDetokenizer(self.tokenizer, params.skip_special_tokens),
            stop_strings=StopStrings(params.stop, params.include_stop_str_in_output),
        )

    def endings(self, ids: Iterable[str]) -> dict[str, Grammar]:
        """Return the grammars that end the thinking of these requests at once, of those that think."""
        open_ids = (one for one in ids if one in self._open)
        return {one: ending for one in open_ids if (ending := self._open[one].ending) is not None}

    # --- prompts in -------------------------------------------------------------------------------------------------

    def prepare(self, message: Question, attempt: Attempt = ANY_TIME) -> Prepared:
        """Do the slow part of `process`, which may run in a thread; `start` does the rest.

        Raises:
            TakesLong: a hurried attempt is not enough for it.
        """
        return self._prompts.prepare(message, attempt)

    def start(self, message: Question, prepared: Prepared) -> Routed:
        """Start the requests of a prepared prompt, or answer the call."""
        if not isinstance(prepared, PreparedPrompt | PreparedTexts):
            return Routed(to_api=[prepared])
        assert isinstance(message, GenerateText), "nothing else is a prompt"
        try:
            if isinstance(prepared, PreparedTexts):
                return Routed(to_engine=self._texts.start(message, prepared))
            return Routed(to_engine=self._requests(message, prepared))
        except Exception as error:
            self._forget(message.ids)
            return Routed(to_api=[rejection(message, error)])

    def _forget(self, ids: Iterable[str]) -> None:
        self._texts.forget(ids)
        for request_id in ids:
            self._open.pop(request_id, None)

    def _requests(self, message: GenerateText, prepared: PreparedPrompt) -> list[ToEngine]:
        prompt, thinking = prepared.token_ids, prepared.thinking
        requests: list[ToEngine] = []
        change = None if message.resumed is not None else self._watch.add(message.conversation, prompt)
        for i, request_id in enumerate(message.ids):
            deltas = _deltas_sent(message, request_id)
            if deltas is None:
                continue
            params = _params_of_continuation(prepared.params, i)
            self.expect(request_id, params, len(prompt))
            self._open[request_id].parser = answer_parser(message, thinking)
            self._open[request_id].change = None if i else change
            self._open[request_id].ending = prepared.ending
            if deltas:
                self._replay(request_id, deltas)
                params = msgspec.structs.replace(params, prompt_logprobs=None)
            elif message.wants_prompt:
                text = message.text if message.text is not None else self.tokenizer.decode(prompt)
                has_logprobs = params.prompt_logprobs is not None
                self._open[request_id].reporter = PromptReporter(text, prompt, has_logprobs)
            requests.append(
                AddRequest(
                    id=request_id,
                    prompt_token_ids=with_surrogates(prompt, prepared.media),
                    params=params,
                    output_token_ids=[token_id for delta in deltas for token_id in delta],
                    priority=message.priority,
                    cache_salt=message.cache_salt,
                    tenant=message.tenant,
                    worker=self._worker,
                    wants_progress=message.wants_progress and not i,
                    needs_no_output=message.needs_no_output,
                    pooling=message.pooling,
                    engine=message.engine,
                    session=message.session,
                    is_background=message.is_background,
                    kv_transfer_params=message.kv_transfer_params,
                    adapter=message.adapter,
                    media=prepared.media,
                    deadline=message.deadline,
                )
            )
        return requests

    def _replay(self, request_id: str, deltas: list[list[int]]) -> None:
        """Restore the state of a dead text worker from the deltas that the client already has."""
        for token_ids in deltas:
            self._text_output(self._open[request_id], TokenOutput(request_id, token_ids), None)

    def resubmitted(self, requests: Iterable[AddRequest]) -> None:
        """Reset the prompt reports of these requests, whose log probabilities another engine will send again."""
        for request in requests:
            opened = self._open.get(request.id)
            if opened is not None and opened.reporter is not None:
                opened.reporter.begin_again()

    # --- tokens out -------------------------------------------------------------------------------------------------

    def _step_outputs(self, message: StepOutputs) -> Routed:
        # First tokens go first: a client that waits for one has nothing yet, and every delta before it costs time.
        first_outputs: list[TextOutput] = []
        later_outputs: list[TextOutput] = []
        stopped: list[str] = []
        refused: list[ToApi] = []
        for output in message.outputs:
            request = self._open.get(output.id)
            if request is None:
                ended = self._texts.end(output) if output.id in self._texts else None
                if isinstance(ended, TextOutput):
                    first_outputs.append(ended)
                elif ended is not None:
                    refused.append(ended)
                continue
            if output.error is not None and output.error_status != TokenMillError.status:
                refused.append(_refusal(self._open.pop(output.id), output))
                continue
            if output.progress is not None:
                progress = output.progress
                told = TextOutput(output.id, "", [], progress.num_tokens, progress.num_cached_tokens, progress=progress)
                first_outputs.append(told)  # before its own first token
                continue
            prompt = None if request.reporter is None else request.reporter.add_output(output)
            if not (output.token_ids or output.finish_reason):
                continue
            outputs = later_outputs if request.num_output_tokens else first_outputs
            text_output = self._text_output(request, output, prompt)
            outputs.append(text_output)
            if text_output.finish_reason is not None:
                del self._open[output.id]
                if output.finish_reason is None:
                    stopped.append(output.id)
        outputs = first_outputs + later_outputs
        return Routed(
            to_engine=[AbortRequests(stopped)] if stopped else [],
            to_api=[TextOutputs(outputs, self._worker), *refused] if outputs else refused,
        )

    def _text_output(self, request: _OpenRequest, output: TokenOutput, prompt: PromptReport | None) -> TextOutput:
        change, request.change = self._watch.confirm(request.change, output.num_cached_tokens), None
        request.num_output_tokens += len(output.token_ids)
        text, answer, stop_string = self._new_text(request, output)
        finish_reason, stop_reason = output.finish_reason, output.stop_reason
        if stop_string is not None:
            finish_reason, stop_reason = FinishReason.STOP, stop_string
        elif stop_reason in self._eos_token_ids and stop_reason not in request.params.stop_token_ids:
            stop_reason = None
        return TextOutput(
            id=output.id,
            text=text,
            token_ids=output.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=output.num_cached_tokens,
            num_external_cached_tokens=output.num_external_cached_tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            logprobs=output.logprobs,
            error=output.error,
            token_bytes=spellings(self.tokenizer, output.logprobs or (), prompt),
            prompt=prompt,
            embedding=output.embedding,
            scheduled_at=output.scheduled_at,
            answer=answer,
            num_reasoning_tokens=0 if request.parser is None else request.parser.num_reasoning_tokens,
            kv_transfer_params=output.kv_transfer_params,
            change=change,
        )

    def _new_text(self, request: _OpenRequest, output: TokenOutput) -> _NewText:
        """Return the text to show for an output, and the stop string that ended it."""
        token_ids = output.token_ids
        ended_by_token = output.finish_reason is FinishReason.STOP and isinstance(output.stop_reason, int)
        if ended_by_token and not request.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        text = request.detokenizer.push(token_ids)
        is_last = output.finish_reason is not None
        if is_last:
            text += request.detokenizer.finish()
        stops = request.stop_strings if request.num_output_tokens > request.params.min_tokens else None
        if (parser := request.parser) is not None:
            # Only the answer is looked through: a model that thinks may come upon any words.
            answer = parser.feed(text, len(output.token_ids), stops)
            if is_last or parser.stop_string is not None:
                is_cut = output.finish_reason not in (None, FinishReason.STOP)
                answer += parser.finish(stops, is_cut)
            return _NewText("", answer, parser.stop_string)
        if stops is None:
            return _NewText(text, None, None)
        text, stop_string = stops.push(text)
        if is_last and stop_string is None:
            text += stops.finish()
        return _NewText(text, None, stop_string)


def _deltas_sent(message: GenerateText, request_id: str) -> list[list[int]] | None:
    """Return the tokens of the deltas that the client has of a request; None if it has ended."""
    return [] if message.resumed is None else message.resumed.get(request_id)


def _params_of_continuation(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of continuation `index`: seed + index, wrapped to 64 bits, so that n texts differ."""
    if params.seed is None or index == 0:
        return params
    seed = (params.seed + index + 2**63) % 2**64 - 2**63
    return msgspec.structs.replace(params, seed=seed)


def _refusal(request: _OpenRequest, output: TokenOutput) -> RequestRejected:
    """Return the rejection of a request that the engine could not begin: at fault itself, or unavailable now."""
    param = request.params.grammar.param if request.params.grammar is not None else None
    return RequestRejected(ids=[output.id], status=output.error_status, error=output.error or "", param=param)
