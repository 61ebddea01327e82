"""Define `LLM`, the whole engine in this process for scripts and batch work: no server, no sockets, no other process.

Methods, arguments and results have vLLM's names; docs/offline.md tells what differs. It sends the same messages that
the server's processes exchange, straight from the text processor to the engine and back. With the engine process, this
package is the only place that knows both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack

from tokenmill.config.model_files import check_tokenizer, default_sampling
from tokenmill.core.engine_messages import EngineReady, EngineStats
from tokenmill.core.errors import InvalidConfig, InvalidRequest, WrongTask
from tokenmill.core.messages import TextOutput
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.llm import arguments
from tokenmill.llm.adapters import LoRARequest
from tokenmill.llm.arguments import ChatOptions, Chats, Conversation, Priority, Prompt, Prompts
from tokenmill.llm.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from tokenmill.llm.local_engine import Inbox, LocalEngine
from tokenmill.llm.outputs import CompletionOutput, RequestOutput
from tokenmill.llm.pooled import PooledMethods, pool_input, pool_modes, pooled_message
from tokenmill.llm.progress import open_progress
from tokenmill.llm.session import Session
from tokenmill.llm.tokenizer import ChatTokenizer
from tokenmill.serving.frontend.chat_template import load_chat_template
from tokenmill.serving.frontend.pooled_texts import embedding_params, texts_of

if TYPE_CHECKING:
    from tokenmill.llm.metrics import Metric

AnyPrompt = Prompt | Conversation
OneParams = SamplingParams | None
Adapters = LoRARequest | Sequence[LoRARequest | None] | None
EachParams = OneParams | Sequence[SamplingParams]


@arguments.checked_names
class LLM(PooledMethods):
    """A model ready to generate; its methods raise TypeError for an argument that they do not have.

    Several threads may use it: their requests run together, in the steps that any of them runs.

    Args:
        model: a checkpoint folder or a hub id; None: the bundled demo model.
        options: fields of `EngineConfig`, e.g. `max_model_len=4096, dtype="float32"`, also by vLLM's names for them.

    Attributes:
        info: the engine that was built, and its sizes.

    Raises:
        InvalidCheckpoint, InvalidConfig: the model cannot be served on this machine; says what to change.
    """

    def __init__(self, model: str | Path = "", **options: Any) -> None:
        config = arguments.engine_config(model, options)
        if config.kv_events() is not None:
            raise InvalidConfig("kv_events_config needs a server: LLM opens no sockets")
        check_tokenizer(config.model, config.tokenizer)
        self._local = LocalEngine(config)
        self.info: EngineReady = self._local.info
        self._config = config
        self._default_params = SamplingParams(**default_sampling(Path(self.info.model)))

    def generate(
        self,
        prompts: Prompts,
        sampling_params: EachParams = None,
        use_tqdm: bool = True,
        *,
        lora_request: Adapters = None,
        priority: Priority = None,
    ) -> list[RequestOutput]:
        """Continue each prompt: a text, a list of token ids, `{"prompt": ...}` or `{"prompt_token_ids": ...}`.

        Args:
            sampling_params: for all prompts, or one for each; None: see `get_default_sampling_params`.
            use_tqdm: show the progress.
            lora_request: the adapter of all prompts, or one for each (`enable_lora=True`).
            priority: for all prompts, or one for each; lower runs first (`scheduling_policy="priority"`).

        Returns:
            One result for each prompt, in their order.

        Raises:
            InvalidRequest: a prompt can never run; nothing is generated then.
        """
        return self._run(arguments.split(prompts, int), sampling_params, use_tqdm, priority, lora_request)

    def chat(
        self, messages: Chats, sampling_params: EachParams = None, use_tqdm: bool = True, **options: Unpack[ChatOptions]
    ) -> list[RequestOutput]:
        """Answer each conversation: lists of `{"role": ..., "content": ...}`, rendered by the model's chat template.

        Args:
            sampling_params, use_tqdm: as for `generate`.
            options: `tools`, `chat_template_kwargs`, `add_generation_prompt` and `continue_final_message`, see
                `ChatOptions`; `priority` and `lora_request`.

        Raises:
            InvalidRequest: as `generate`, or the template refuses the messages.
        """
        batch = arguments.split(messages, dict)
        if not all(isinstance(one, list) for one in batch):
            raise InvalidRequest("messages must be a list of messages, or a list of such lists", "messages")
        priority, adapters = options.pop("priority", None), options.pop("lora_request", None)
        template = arguments.template_options(options)
        return self._run(batch, sampling_params, use_tqdm, priority, adapters, template_options=template)

    def stream(
        self, prompt: AnyPrompt, sampling_params: OneParams = None, **options: Unpack[ChatOptions]
    ) -> Iterator[TextOutput]:
        """Yield the deltas of one prompt or conversation. Leaving the loop early aborts the request."""
        (rank,) = arguments.one_each("priority", options.pop("priority", None), 1)
        (adapter,) = arguments.one_each("lora_request", options.pop("lora_request", None), 1)
        template = arguments.template_options(options)
        inbox = Inbox()
        wishes = {"template_options": template, "priority": rank, "lora_request": adapter}
        output = self.start(inbox, prompt, sampling_params, wishes)
        try:
            unfinished = dict.fromkeys(output.request_ids, output)
            while unfinished:
                deltas, _ = self._local.advance(unfinished, inbox)
                yield from deltas
        finally:
            self._local.abort([output])

    def session(self) -> Session:
        """Open a session, whose turns append to each other without computing anything twice.

        Raises:
            InvalidRequest: the model has no turns: it writes down sound.
        """
        if self.info.transcription is not None:
            raise WrongTask("this model writes down sound, a clip at a time: sessions are for texts", "session")
        return Session(self._local, self._default_params)

    def beam_search(self, prompts: Prompts, params: BeamSearchParams, use_tqdm: bool = False) -> list[BeamSearchOutput]:
        """Return the most likely continuations of each prompt, keeping the best ones at every length.

        Raises:
            InvalidRequest: as `generate`.
            TokenMillError: a prompt failed.
        """
        batch, limits = arguments.split(prompts, int), self._local.engine.limits
        searches = search_beams(batch, params, limits, lambda beams, one: self._run(beams, one, use_tqdm))
        return [search.output(self._local.tokenizer.decode) for search in searches]

    def submit(
        self,
        prompt: AnyPrompt,
        sampling_params: OneParams = None,
        template_options: dict[str, Any] | None = None,
        priority: int = 0,
        pooling: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Add a prompt to those that `step` advances; its result fills up with the steps, see `finished`.

        Args:
            template_options: for a conversation: `tools` and variables of the chat template.
            priority, lora_request: as for `generate`.
            pooling: a vector is wanted: mean, last, or "" for the model's own way; None: the prompt is continued.

        Raises:
            InvalidRequest: it can never run.
        """
        wishes = {"priority": priority, "pooling": pooling, "lora_request": lora_request}
        return self.start(None, prompt, sampling_params, wishes | {"template_options": template_options})

    def start(
        self, inbox: Inbox | None, prompt: AnyPrompt, sampling_params: OneParams, wishes: Mapping[str, Any]
    ) -> RequestOutput:
        """Add a prompt as `submit` does, with its other arguments in `wishes`; the inbox gets its deltas, too.

        Raises:
            InvalidRequest: it can never run, or the model does not generate.
        """
        if (pooling := wishes.get("pooling")) is not None:
            return self._start_pooled(inbox, prompt, pooling)
        if self.info.pooling is not None:
            raise WrongTask(f"{self.info.pooling.purpose}; it generates no text", "prompt")
        params = self._default_params if sampling_params is None else sampling_params
        template, priority = wishes.get("template_options") or {}, wishes.get("priority") or 0
        if priority and self._config.scheduling_policy in ("fair", "fcfs"):
            raise InvalidRequest('priority needs LLM(scheduling_policy="priority")', "priority")
        adapter = self._local.find_adapter(wishes.get("lora_request"))
        message = arguments.generate_text(prompt, params, template, priority, adapter)
        message.needs_no_output = bool(wishes.get("is_score"))
        text = prompt.get("prompt") if isinstance(prompt, dict) else message.text
        continuations = [CompletionOutput(index) for index in range(params.n)]
        output = RequestOutput(message.ids[0], [], continuations, message.ids, text)
        self._local.start(message, output, inbox)
        if message.messages is not None:
            output.prompt = self._local.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        return output

    def _start_pooled(self, inbox: Inbox | None, prompt: AnyPrompt, pooling: str) -> RequestOutput:
        """Add a prompt that wants a vector; `pooling` "": as the model is made for."""
        params = embedding_params(self.info.pooling, pool_modes(pooling or None))
        message, (output,) = pooled_message(texts_of(self.info.pooling, [pool_input(prompt)]), params)
        self._local.start(message, output, inbox)
        return output

    def step(self) -> list[TextOutput]:
        """Run one step of the engine; return the deltas of all open requests."""
        return self._local.step()

    def abort(self, outputs: Sequence[RequestOutput]) -> None:
        """Abort results of `submit` that have not finished."""
        self._local.abort(outputs)

    @property
    def has_open(self) -> bool:
        """True if `step` has requests to advance."""
        return self._local.has_open

    def get_tokenizer(self) -> ChatTokenizer:
        """Return the model's tokenizer and chat template, with the methods that transformers has for them."""
        folder, tokenizer = Path(self._config.tokenizer or self.info.model), self._local.tokenizer
        return ChatTokenizer(tokenizer, load_chat_template(folder, tokenizer.special_tokens))

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model's authors recommend; calls without parameters use them."""
        return self._default_params

    def stats(self) -> EngineStats:
        """Return the counters since the start or `wake_up`, and current use: rows, pages, cache hits, preemptions."""
        with self._local.turns:
            return self._local.engine.stats()

    def get_metrics(self, prefix: str = "tokenmill") -> list[Metric]:
        """Return `stats` as metrics under the server's names, which begin with `prefix`, e.g. `vllm`."""
        from tokenmill.llm.metrics import read_metrics

        return list(read_metrics(self.info, self.stats(), prefix))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes; return False, and forget nothing, if requests still run.

        Args:
            reset_running_requests: send these back to the queue first; they are computed again.
            reset_connector: forget prefixes stored elsewhere too (`kv_disk`, `kv_host_size`, custom sources).
        """
        with self._local.turns:
            return self._local.engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def sleep(self, level: int = 1) -> None:
        """Give back memory until `wake_up`: level 1, the KV cache (and a GPU's weights); level 2, KV cache and weights.

        Raises:
            InvalidRequest: requests or sessions are open. Every call that needs the engine raises it during sleep.
        """
        self._local.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again, the same as before; weights that were given back are read again.

        Args:
            tags: `weights` or `kv_cache`; it wakes up once both have been given. None: both.

        Raises:
            OutOfMemory, InvalidConfig, InvalidCheckpoint: as at its construction; it goes on sleeping.
        """
        self._local.wake_up(tags)

    def close(self) -> None:
        """End all requests and free the engine's thread."""
        self._local.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        batch: list[Any],
        params: EachParams,
        use_tqdm: bool,
        priority: Priority = None,
        adapters: Adapters = None,
        **wishes: Any,
    ) -> list[RequestOutput]:
        own_params = arguments.one_each("sampling_params", params, len(batch))
        priorities = arguments.one_each("priority", priority, len(batch))
        own_adapters = arguments.one_each("lora_request", adapters, len(batch))
        outputs: list[RequestOutput] = []
        inbox = Inbox()
        try:
            for prompt, own, rank, adapter in zip(batch, own_params, priorities, own_adapters, strict=True):
                own_wishes = wishes | {"priority": rank, "lora_request": adapter}
                outputs.append(self.start(inbox, prompt, own, own_wishes))
            self._wait(outputs, inbox, use_tqdm)
        finally:
            self._local.abort(outputs)
        return outputs

    def _wait(self, outputs: list[RequestOutput], inbox: Inbox, use_tqdm: bool) -> None:
        """Run steps until all results are finished."""
        unfinished = {request_id: output for output in outputs for request_id in output.request_ids}
        num_ended = 0
        with open_progress(len(outputs), use_tqdm) as progress:
            while unfinished:
                deltas, num_more = self._local.advance(unfinished, inbox)
                num_ended += num_more
                progress.update(num_ended, sum(len(delta.token_ids) for delta in deltas))
