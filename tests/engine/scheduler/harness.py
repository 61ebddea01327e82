"""An engine over the paged-memory runner, with every output collected and every invariant checked after each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.engine.scheduler.drafters import HalfRightDrafter
from tests.engine.scheduler.page_uses import PageUses
from tokenmill.config.speculation import SpeculationSettings
from tokenmill.core.adapters import AdapterRef
from tokenmill.core.errors import InvalidRequest
from tokenmill.core.extension import EngineExtension
from tokenmill.core.media import MediaInput, with_surrogates
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.pooling import PoolingParams, PoolMode
from tokenmill.core.request import FinishReason, RequestStatus
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.core.transfers import TransferSettings
from tokenmill.engine.kv.window_pages import WindowSettings
from tokenmill.engine.loop.engine import Engine, ModelLimits
from tokenmill.engine.loop.gates import Gate, Gates
from tokenmill.engine.loop.observer import Observer, Watchdog
from tokenmill.engine.loop.step_log import LogHeader, StepLog
from tokenmill.engine.scheduler.config import SchedulerConfig
from tokenmill.engine.scheduler.resources.encoder_cache import EncoderCache
from tokenmill.engine.scheduler.resources.windows import Windows
from tokenmill.engine.scheduler.seniority import is_ready
from tokenmill.engine.transfer.connector import KVConnector
from tokenmill.engine.transfer.extension import KVTransfer, TransferExecutor
from tokenmill.lab.conformance.memory_runner import VOCAB_SIZE, PagedMemoryRunner, expected_output
from tokenmill.lab.conformance.trace import turns_of_an_elder


@dataclass
class Settings:
    """A small engine: few pages, few rows, a small budget, so that everything runs short."""

    num_pages: int = 12
    page_size: int = 4
    max_num_seqs: int = 4
    budget: int = 16
    threshold: int = 0
    chunked: bool = True
    caching: bool = True
    policy: str = "fcfs"
    batch_policy: str = "mixed"
    admission: str = "whole-prompt"
    depth: int = 1
    num_stages: int = 1
    drafts: int = 0
    speculation: SpeculationSettings | None = None
    max_model_len: int = 32
    eos: frozenset[int] = frozenset()
    log: Path | None = None
    watchdog: Path | None = None
    gates: tuple[Gate, ...] = ()
    transfers: TransferSettings | None = None
    max_loras: int = 0
    lora_patience: int = 8
    patience: int = 1024
    encoder_budget: int = 0
    encoder_cache_tokens: int = 0
    whole_images: bool = False
    state_slots: int = 0
    connect: Callable[[Harness], KVConnector] | None = None
    window: WindowSettings | None = None
    least_copied: int = 0


@dataclass
class Record:
    """The input and the output of one request."""

    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_external_cached_tokens: int = 0
    told: list[int] = field(default_factory=list)
    pooling: str = ""
    embedding: bytes | None = None


@dataclass
class Turns:
    """Turns of the loop in which a request could run, and a bound on them; see `Harness.check_bounds`."""

    most: int
    num_late: int
    count: int = 0


class Harness:
    """Drives an engine step by step."""

    def __init__(self, settings: Settings | None = None, **overrides: object) -> None:
        self.settings = s = settings or Settings(**overrides)  # type: ignore[arg-type]
        config = SchedulerConfig(
            s.max_num_seqs,
            s.budget,
            s.threshold,
            s.chunked,
            s.policy,
            s.batch_policy,
            s.admission,
            num_stages=s.num_stages,
            max_loras=s.max_loras,
            lora_patience=s.lora_patience,
            encoder_budget=s.encoder_budget,
            encoder_cache_tokens=s.encoder_cache_tokens,
            disable_chunked_mm_input=s.whole_images,
            state_slots=s.state_slots,
            patience=s.patience,
        )
        self.header = LogHeader(
            scheduler=config,
            num_pages=s.num_pages,
            page_size=s.page_size,
            enable_prefix_caching=s.caching,
            max_model_len=s.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=sorted(s.eos),
            depth=s.depth,
            speculation=s.speculation,
            transfers=s.transfers,
            window=s.window,
            least_copied=s.least_copied,
        )
        drafter = HalfRightDrafter(s.drafts) if s.drafts else None
        self.scheduler = self.header.make_scheduler(drafter=drafter)
        self.kv = self.scheduler.kv
        self.runner = PagedMemoryRunner(
            s.max_num_seqs, s.num_pages, s.page_size, s.max_model_len, bool(s.state_slots), s.window
        )
        limits = ModelLimits(s.max_model_len, VOCAB_SIZE, s.eos)
        observer = Observer(StepLog(s.log, self.header), Watchdog(s.watchdog))
        self.connector = None if s.connect is None else s.connect(self)
        executor = self.runner if self.connector is None else TransferExecutor(self.runner, self.connector)
        self.uses = PageUses(self.scheduler)
        self.runner.told.append(self.uses.launched)
        extensions: list[EngineExtension] = [Gates(s.gates)] if s.gates else []
        if self.connector is not None:
            extensions.append(KVTransfer(self.scheduler, self.connector))
        self.engine = Engine(self.scheduler, executor, limits, s.depth, observer, extensions)
        self.records: dict[str, Record] = {}
        self.turns: dict[str, Turns] = {}
        self.page_tables: dict[tuple[str, int], list[int]] = {}
        self.sessions: dict[str, list[Record]] = {}
        self.inputs: dict[str, list[tuple[list[int], SamplingParams]]] = {}

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str = "",
        tenant: str = "",
        is_resumable: bool = False,
        pooling: str = "",
        status: RequestStatus = RequestStatus.WAITING,
        **params: object,
    ) -> str:
        """Send a request; its id is its number. `params`: of sampling, `is_background`, `adapter`."""
        is_background = bool(params.pop("is_background", False))
        request_id = str(len(self.records))
        adapter = params.pop("adapter", None)
        media: list[MediaInput] = params.pop("media", [])  # type: ignore[assignment]
        kv_transfer_params = params.pop("kv_transfer_params", None)
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.settings.eos)
        self.records[request_id] = Record(prompt, sampling, stop_ids, pooling=pooling)
        self.count_turns(request_id)
        message = AddRequest(
            id=request_id,
            prompt_token_ids=with_surrogates(prompt, media),
            media=media,
            params=sampling,
            priority=priority,
            cache_salt=salt,
            tenant=tenant,
            is_resumable=is_resumable,
            pooling=PoolingParams(modes=(PoolMode(pooling),)) if pooling else None,
            is_background=is_background,
            kv_transfer_params=kv_transfer_params,  # type: ignore[arg-type]
            adapter=None if adapter is None else AdapterRef(str(adapter), "", f"digest-{adapter}"),
        )
        self.collect(self.engine.add(message, status))
        return request_id

    def open_session(self, prompt: list[int], max_tokens: int) -> str:
        """Start a session: a record of its first turn, which later turns replace."""
        request_id = self.add(prompt, max_tokens, is_resumable=True)
        self.sessions[request_id] = []
        return request_id

    def extend(self, request_id: str, token_ids: list[int], max_tokens: int, is_last: bool = False) -> bool:
        """Send a session its next input, for now or for the end of its turn; False if it is refused."""
        params = SamplingParams(max_tokens=max_tokens)
        try:
            self.engine.extend(request_id, token_ids, params, is_last)
        except InvalidRequest:
            return False
        self.inputs.setdefault(request_id, []).append((token_ids, params))
        if self.records[request_id].finish_reason is not None:
            self.begin_turn(request_id)
        return True

    def begin_turn(self, request_id: str) -> None:
        """The session's turn is over and it goes on with its next input."""
        record = self.records[request_id]
        self.check_output(request_id, record)
        self.sessions[request_id].append(record)
        token_ids, params = self.inputs[request_id].pop(0)
        # The last token of a turn was never run; the next turn does not see it.
        prompt = record.prompt + record.tokens[:-1] + token_ids
        self.records[request_id] = Record(prompt, params, record.stop_ids)
        self.count_turns(request_id)

    def abort(self, *ids: str) -> None:
        """End requests."""
        self.collect(self.engine.abort(ids))
        self.scheduler.check_invariants()

    def step(self) -> None:
        """One turn of the loop, then every check. Liveness: with nothing launched, something must have run."""
        self.collect(self.engine.step())
        self.scheduler.check_invariants()
        self.check_page_tables()
        self.check_batch()
        self.check_stages()
        self.check_bounds()
        assert not (self.engine.is_idle and self.scheduler.is_stuck), "somebody could run and the plan is empty"

    def check_stages(self) -> None:
        """Of a pipeline no request is in two launched steps that bring it tokens, and none has all decodes."""
        steps, num_stages = self.scheduler.in_flight, self.settings.num_stages
        if num_stages == 1 or not steps:
            return
        sampling = [r.id for step in steps for r, n in zip(step.requests, step.plan.num_samples, strict=True) if n]
        assert len(sampling) == len(set(sampling)), "a token is asked for before the one before it is known"

    def most_steps(self) -> int:
        """A bound on the steps until nothing is left: as if requests ran one after the other, each from its beginning.

        The first in order never yields, so a schedule that takes more runs the same tokens again and again. Where
        clients take turns it yields to those who had less, and runs again what it had: twice that was never needed.
        With more adapters than slots it yields to one that has waited for a slot: then the bound of elders alone holds.
        """
        adapters = {request.adapter_name for request in self.scheduler.requests.values()} - {""}
        if len(adapters) > self.settings.max_loras:
            return (len(self.scheduler.requests) + 1) * self.most_steps_of_an_elder()
        chunk = min(self.settings.budget, self.settings.threshold or self.settings.budget)
        alive = self.scheduler.requests.values()
        # A chunk may end before each image, and before each one that is not to be cut once more.
        alone = [-(-r.num_tokens // chunk) + 2 * len(r.media) + r.max_tokens_total - r.num_tokens + 1 for r in alive]
        alone += [2 * self.settings.max_model_len for inputs in self.inputs.values() for _ in inputs]
        turns = 2 if self.settings.policy == "fair" else 1
        return turns * self.settings.depth * (sum(alone) + 2)

    def most_steps_of_an_elder(self) -> int:
        """Return the most steps in which an elder ends, with these settings."""
        return turns_of_an_elder(self.header.scheduler, self.settings.max_model_len, self.settings.depth)

    def count_turns(self, request_id: str) -> None:
        """A request comes, or a session's turn: those before it may each be the elder first."""
        num_before = len(self.scheduler.requests)
        self.turns[request_id] = Turns((num_before + 1) * self.most_steps_of_an_elder(), self.runner.num_late)

    def check_bounds(self) -> None:
        """Check that no request that could run has been there for longer than its bound, whatever came later.

        A sample that was late costs the steps that were launched behind it.
        """
        for request in self.scheduler.requests.values():
            if request.is_running or is_ready(request):
                turns = self.turns[request.id]
                turns.count += 1
                most = turns.most + self.settings.depth * (self.runner.num_late - turns.num_late)
                assert turns.count <= most, f"request {request.id} starves: {self.scheduler.explain(request.id)}"

    def drain(self) -> None:
        """Run until nothing is left; then nothing may be in use."""
        limit, num_steps = self.most_steps(), 0
        num_late = self.runner.num_late
        # A step whose sample was late is run again.
        while self.engine.has_work and num_steps < limit + self.settings.depth * (self.runner.num_late - num_late):
            self.step()
            num_steps += 1
        stuck = {id: (r.status.value, self.scheduler.explain(id)) for id, r in self.scheduler.requests.items()}
        assert not self.engine.has_work, f"no end after {num_steps} steps: {stuck}"
        self.abort(*[request.id for request in self.scheduler.requests.values() if request.is_paused])
        self.settle()
        assert self.kv.num_pinned == 0, "pages are still in use"
        windows = self.scheduler.resource(Windows)
        assert windows is None or windows.pages.num_pinned == windows.pages.num_promised == 0, "window pages in use"
        if (encoder := self.scheduler.resource(EncoderCache)) is not None:
            encoder.begin_step(self.scheduler.step + 1, self.scheduler.state)
            assert encoder._num_held() == 0, "outputs of images are still held"
        assert self.scheduler.state.rows.num_free == self.settings.max_num_seqs, "rows are still in use"
        self.check_outputs()

    def settle(self) -> None:
        """Let what is outside come to its end."""

    def check_outputs(self) -> None:
        """Every request that ended by itself has exactly its expected output; every other one a prefix of it."""
        for request_id, record in self.records.items():
            self.check_output(request_id, record)

    def check_output(self, request_id: str, record: Record) -> None:
        """Check the output of one request, or of one turn of a session, as `check_outputs` does."""
        room = self.settings.max_model_len - len(record.prompt)
        limit = min(room, record.params.max_tokens or room)
        expected = expected_output(record.prompt, limit, record.stop_ids)
        assert record.finish_reason is not None, f"request {request_id} was never answered"
        if record.params.prompt_logprobs is not None:
            all_told = list(range(1, len(record.prompt)))
            is_complete = record.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            assert record.told == (all_told if is_complete else all_told[: len(record.told)]), "each once, in order"
        if record.pooling and record.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert record.embedding == len(record.prompt).to_bytes(4, "little"), "one vector, of the whole prompt"
        elif record.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert record.tokens == expected, f"request {request_id}: {record.tokens} != {expected}"
            stopped = bool(expected) and expected[-1] in record.stop_ids
            assert record.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        else:
            assert record.tokens == expected[: len(record.tokens)]

    def check_page_tables(self) -> None:
        """A page table only grows while its request holds a row: nothing found later is ever swapped in.

        But for the pages that rejected drafts leave behind the tokens that are computed.
        """
        tables = {}
        for request in self.scheduler.requests.values():
            if request.row is not None:
                key = (request.id, request.num_preemptions)
                tables[key] = list(self.kv.pages(request))
                before = self.page_tables.get(key, [])
                assert tables[key][: len(before)] == before, f"the page table of request {request.id} changed"
                if self.settings.drafts or self.settings.speculation is not None:
                    del tables[key][self.kv.num_pages_for(request.num_computed_tokens) :]
        self.page_tables = tables

    def check_batch(self) -> None:
        """With `prefill-first`, a step is all prompts, else all last tokens: sampled from, or pooled."""
        if self.settings.batch_policy == "prefill-first" and self.runner.plans:
            plan = self.runner.plans[-1]
            new = [row.request_id for row in plan.new_rows]
            kinds = set()
            for place, request_id in enumerate(plan.request_ids):
                record, count = self.records[request_id], plan.num_scheduled[place]
                is_pooled = bool(record.pooling) and plan.num_computed[place] + count == len(record.prompt)
                kinds.add(request_id not in new and count == (1 if is_pooled else plan.num_samples[place]))
            assert len(kinds) == 1, f"step {plan.step} mixes prompts with decodes"

    def collect(self, outputs: list[TokenOutput]) -> None:
        """Note what came back; nothing may come after a request's end."""
        for output in outputs:
            record = self.records[output.id]
            if output.id in self.sessions and record.finish_reason is not None:
                # The turn was answered; now the paused session is ended.
                assert output.finish_reason is FinishReason.ABORT
                self.check_output(output.id, record)
                record.finish_reason = None
            assert record.finish_reason is None, f"request {output.id} was answered after its end"
            record.tokens.extend(output.token_ids)
            record.finish_reason = output.finish_reason
            for one in output.prompt_logprobs or []:
                assert record.prompt[int(one.sampled.logprob)] == one.sampled.token_id
                record.told.append(int(one.sampled.logprob))
            if output.embedding is not None:
                record.embedding = output.embedding
            record.num_cached_tokens = output.num_cached_tokens or record.num_cached_tokens
            record.num_external_cached_tokens = max(
                record.num_external_cached_tokens, output.num_external_cached_tokens
            )
            if output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and self.inputs.get(output.id):
                self.begin_turn(output.id)


def plans(harness: Harness) -> list[dict[str, int]]:
    """Each launched step as {request id: tokens}."""
    return [dict(zip(plan.request_ids, plan.num_scheduled.tolist(), strict=True)) for plan in harness.runner.plans]
