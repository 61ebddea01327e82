"""An engine over the paged-memory runner, with every output collected and every invariant checked after each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tests.scheduler.paged_memory_runner import VOCAB_SIZE, PagedMemoryRunner, expected_output
from tokenmill.engine.engine import Engine, ModelLimits
from tokenmill.engine.parts import make_scheduler
from tokenmill.engine.step_log import LogHeader, StepLog
from tokenmill.errors import InvalidRequest
from tokenmill.messages import AddRequest, TokenOutput
from tokenmill.request import FinishReason, RequestStatus
from tokenmill.sampling_params import SamplingParams
from tokenmill.scheduler.config import SchedulerConfig


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
    admission: str = "optimistic"
    depth: int = 1
    max_model_len: int = 32
    eos: frozenset[int] = frozenset()
    log: Path | None = None


@dataclass
class Record:
    """What was asked and what came back."""

    prompt: list[int]
    params: SamplingParams
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0


class Harness:
    """Drives an engine step by step."""

    def __init__(self, settings: Settings | None = None, **overrides: object) -> None:
        self.settings = s = settings or Settings(**overrides)  # type: ignore[arg-type]
        config = SchedulerConfig(
            s.max_num_seqs, s.budget, s.threshold, s.chunked, s.policy, s.batch_policy, s.admission
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
        )
        self.scheduler = make_scheduler(config, s.num_pages, s.page_size, s.caching)
        self.kv = self.scheduler.kv
        self.runner = PagedMemoryRunner(s.max_num_seqs, s.num_pages, s.page_size, s.max_model_len)
        limits = ModelLimits(s.max_model_len, VOCAB_SIZE, s.eos)
        self.engine = Engine(self.scheduler, self.runner, limits, s.depth, StepLog(s.log, self.header))
        self.records: dict[str, Record] = {}
        self.page_tables: dict[tuple[str, int], list[int]] = {}
        self.sessions: dict[str, list[Record]] = {}

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        salt: str = "",
        group: str = "",
        is_resumable: bool = False,
        status: RequestStatus = RequestStatus.WAITING,
        **params: object,
    ) -> str:
        """Send a request; its id is its number."""
        request_id = str(len(self.records))
        sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.settings.eos)
        self.records[request_id] = Record(prompt, sampling, stop_ids)
        message = AddRequest(
            id=request_id,
            prompt_token_ids=prompt,
            params=sampling,
            priority=priority,
            cache_salt=salt,
            group=group,
            is_resumable=is_resumable,
        )
        self.collect(self.engine.add(message, status))
        return request_id

    def open_session(self, prompt: list[int], max_tokens: int) -> str:
        """Start a session: a record of its first turn, which later turns replace."""
        request_id = self.add(prompt, max_tokens, is_resumable=True)
        self.sessions[request_id] = []
        return request_id

    def extend(self, request_id: str, token_ids: list[int], max_tokens: int, is_last: bool = False) -> bool:
        """Send a paused session its next input; False if it is not paused or has no room."""
        record = self.records[request_id]
        params = SamplingParams(max_tokens=max_tokens)
        try:
            self.engine.extend(request_id, token_ids, params, is_last)
        except InvalidRequest:
            return False
        self.check_output(request_id, record)
        self.sessions[request_id].append(record)
        # The last token of a turn was never run; the next turn does not see it.
        prompt = record.prompt + record.tokens[:-1] + token_ids
        self.records[request_id] = Record(prompt, params, record.stop_ids)
        return True

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
        assert not (self.engine.is_idle and self.scheduler.is_stuck), "somebody could run and the plan is empty"

    def drain(self, limit: int = 2000) -> None:
        """Run until nothing is left; then nothing may be in use."""
        for _ in range(limit):
            if not self.engine.has_work:
                break
            self.step()
        stuck = {id: (r.status.value, self.scheduler.explain(id)) for id, r in self.scheduler.books.requests.items()}
        assert not self.engine.has_work, f"no end after {limit} steps: {stuck}"
        self.abort(*[request.id for request in self.scheduler.books.requests.values() if request.is_paused])
        assert self.kv.num_pinned == 0, "pages are still in use"
        assert self.scheduler.books.rows.num_free == self.settings.max_num_seqs, "rows are still in use"
        self.check_outputs()

    def check_outputs(self) -> None:
        """Every request that ended by itself has exactly its expected output; every other one a prefix of it."""
        for request_id, record in self.records.items():
            self.check_output(request_id, record)

    def check_output(self, request_id: str, record: Record) -> None:
        """See `check_outputs`, for one request or one turn of a session."""
        room = self.settings.max_model_len - len(record.prompt)
        limit = min(room, record.params.max_tokens or room)
        expected = expected_output(record.prompt, limit, record.stop_ids)
        assert record.finish_reason is not None, f"request {request_id} was never answered"
        if record.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert record.tokens == expected, f"request {request_id}: {record.tokens} != {expected}"
            stopped = bool(expected) and expected[-1] in record.stop_ids
            assert record.finish_reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
        else:
            assert record.tokens == expected[: len(record.tokens)]

    def check_page_tables(self) -> None:
        """A page table only grows while its request holds a row: nothing found later is ever swapped in."""
        tables = {}
        for request in self.scheduler.books.requests.values():
            if request.row is not None:
                key = (request.id, request.num_preemptions)
                tables[key] = list(self.kv.pages(request))
                before = self.page_tables.get(key, [])
                assert tables[key][: len(before)] == before, f"the page table of request {request.id} changed"
        self.page_tables = tables

    def check_batch(self) -> None:
        """With `prefill-first`, a step is all prompts, else all decodes."""
        if self.settings.batch_policy == "prefill-first" and self.runner.plans:
            plan = self.runner.plans[-1]
            new = [row.request_id for row in plan.new_rows]
            columns = zip(plan.request_ids, plan.num_scheduled, plan.samples, strict=True)
            kinds = {count == 1 and samples and request_id not in new for request_id, count, samples in columns}
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
            record.num_cached_tokens = output.num_cached_tokens or record.num_cached_tokens


def plans(harness: Harness) -> list[dict[str, int]]:
    """Each launched step as {request id: tokens}."""
    return [dict(zip(plan.request_ids, plan.num_scheduled.tolist(), strict=True)) for plan in harness.runner.plans]
