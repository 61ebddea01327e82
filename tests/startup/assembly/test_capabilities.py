"""A capability that the engine has never heard of is installed with one line, and takes part in everything."""

from __future__ import annotations

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tokenmill.config.configs import EngineConfig
from tokenmill.core.engine_messages import EngineReady
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.extension import EngineExtension, Host
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.plan import StepPlan
from tokenmill.core.request import FinishReason, Request, RequestStatus
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.kv.radix_tree import PrefixMatch
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.scheduler.resources.resource import Resource
from tokenmill.engine.scheduler.scheduler import Scheduler
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.capabilities import CAPABILITIES
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.memory import StepMemory
from tokenmill.startup.assembly.setup import build_engine

END = ["leaves the turnstile", "has ended", "is released", "has gone"]


class Toll:
    """A gate that every request passes at the second look."""

    status = RequestStatus.WAITING_FOR_GRAMMAR

    def __init__(self, diary: list[str]) -> None:
        self.diary = diary
        self.waiting: dict[str, int] = {}

    def admit(self, message: AddRequest) -> bool:
        self.diary.append(f"{message.id} is admitted")
        self.waiting[message.id] = 0
        return False

    def collect(self, timeout: float) -> dict[str, None]:
        passed = [request_id for request_id, looks in self.waiting.items() if looks]
        self.waiting = {request_id: 1 for request_id in self.waiting if request_id not in passed}
        return dict.fromkeys(passed)

    def release(self, request_id: str) -> None:
        self.diary.append(f"{request_id} is released")

    def close(self) -> None:
        self.diary.append("the gate is closed")


class Turnstile(Resource):
    """Lets one request in at a time."""

    def __init__(self, diary: list[str]) -> None:
        self.diary = diary
        self.owner = ""

    def acquire(self, request: Request, match: PrefixMatch, num_tokens: int, step: int) -> str:
        if self.owner:
            return "waits at the turnstile"
        self.owner = request.id
        return ""

    def release(self, request: Request, step: int) -> None:
        assert self.owner == request.id
        self.owner = ""
        self.diary.append(f"{request.id} leaves the turnstile")


class Shoes(RowExtension):
    """Notes which rows begin and how many tokens run."""

    def __init__(self, diary: list[str]) -> None:
        self.diary = diary

    def enter(self, plan: StepPlan) -> Arrays:
        self.diary += [f"{new.request_id} has a row" for new in plan.new_rows if "warm-up" not in new.request_id]
        return {"shoes": np.array(plan.rows)}

    def apply(self, plan: StepPlan, sent: Sent) -> None:
        assert sent["shoes"].tolist() == plan.rows.tolist()

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        assert len(batch.token_ids) == plan.num_tokens
        return batch


class Porter(EngineExtension):
    """Notes who comes, and who has gone."""

    def __init__(self, diary: list[str]) -> None:
        self.diary = diary

    def arrived(self, message: AddRequest) -> None:
        self.diary.append(f"{message.id} has arrived")

    def before_schedule(self, engine: Host) -> None:
        assert all(request_id for request_id in engine.requests)

    def committed(self, outputs: Sequence[TokenOutput]) -> None:
        self.diary += [f"{output.id} has ended" for output in outputs if output.finish_reason is not None]

    def released(self, ended: Sequence[str], alive: Container[str]) -> None:
        self.diary += [f"{request_id} has gone" for request_id in ended if request_id not in alive]


class Dummy(Capability):
    """A gate, a resource, a part of rows and a part of the loop."""

    diary: ClassVar[list[str]] = []

    @classmethod
    def check(cls, config: EngineConfig, architecture: Architecture, platform: Platform) -> None:
        if config.seed == 13:
            raise InvalidConfig("--seed: 13 brings bad luck")

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        return None if assembly.config.seed == 7 else cls()

    def gates(self) -> tuple[Toll]:
        return (Toll(self.diary),)

    def resources(self) -> tuple[Turnstile]:
        return (Turnstile(self.diary),)

    def row_extensions(self, memory: StepMemory) -> tuple[Shoes]:
        return (Shoes(self.diary),)

    def engine_extensions(self, scheduler: Scheduler) -> tuple[Porter]:
        return (Porter(self.diary),)

    def describe(self, ready: EngineReady, memory: StepMemory) -> None:
        ready.kernels_reason += ", with a dummy"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("m"), "qwen3", vocab_size=277, num_hidden_layers=1)


def build(model: Path, capabilities: Sequence[type[Capability]], **options: Any) -> tuple[Engine, EngineReady]:
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_model_len": 16, "page_size": 4, "num_pages": 60}
    config = EngineConfig(
        model=str(model), num_threads=1, device="cpu", dtype="float32", kernels="torch", **{**sizes, **options}
    )
    built = build_engine(config.resolve(), capabilities=capabilities)
    return built.engine, built.ready


def serve(engine: Engine, *ids: str) -> dict[str, list[int]]:
    """The tokens of greedy requests, all of one prompt."""
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    for request_id in ids:
        assert not engine.add(AddRequest(id=request_id, prompt_token_ids=[5, 6, 7], params=params))
    tokens: dict[str, list[int]] = {request_id: [] for request_id in ids}
    while engine.has_work:
        for output in engine.step():
            tokens[output.id] += output.token_ids
            assert output.finish_reason in (None, FinishReason.LENGTH)
    engine.close()
    return tokens


def test_a_capability_that_nobody_knows_takes_part_in_everything(model: Path) -> None:
    Dummy.diary.clear()
    engine, ready = build(model, (*CAPABILITIES, Dummy))
    tokens = serve(engine, "a", "b")
    assert ready.kernels_reason.endswith(", with a dummy")
    assert engine.extension(Porter) is not None
    for who in "ab":
        own = [line.removeprefix(f"{who} ") for line in Dummy.diary if line.startswith(who)]
        assert own == ["is admitted", "has arrived", "has a row", *END]
    assert Dummy.diary.index("a leaves the turnstile") < Dummy.diary.index("b has a row")
    assert Dummy.diary[-1] == "the gate is closed"
    assert tokens == serve(build(model, CAPABILITIES)[0], "a", "b"), "it changes no token"


def test_it_refuses_before_weights_are_read_and_stays_away_where_it_is_not_wanted(model: Path) -> None:
    Dummy.diary.clear()
    with pytest.raises(InvalidConfig, match="bad luck"):
        build(model, (*CAPABILITIES, Dummy), seed=13)
    engine, ready = build(model, (*CAPABILITIES, Dummy), seed=7)
    serve(engine, "a")
    assert not Dummy.diary
    assert "dummy" not in ready.kernels_reason


def test_a_plain_engine_loops_over_nothing(model: Path) -> None:
    engine, _ = build(model, ())
    assert not engine._poll and not engine._before_schedule and not engine._committed and not engine._released
    assert set(map(len, serve(engine, "a").values())) == {3}
