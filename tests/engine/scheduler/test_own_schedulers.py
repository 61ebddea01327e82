"""Schedulers from outside: found by entry point or `module:Class`, served for real, and refused what they lack."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lab.conformance.faulty import Plain
from tests.lab.conformance.one_at_a_time import OneAtATime
from tokenmill import LLM, SamplingParams
from tokenmill.cli.main import main
from tokenmill.config.configs import EngineConfig
from tokenmill.core.adapters import AdapterRef
from tokenmill.core.errors import InvalidConfig, InvalidRequest
from tokenmill.core.messages import AddRequest
from tokenmill.core.pooling import PoolingParams
from tokenmill.core.scheduling import Feature, SchedulerInterface, check_served
from tokenmill.core.structured_outputs import StructuredOutputs
from tokenmill.engine.scheduler.scheduler import Scheduler, find_scheduler
from tokenmill.startup.assembly.scheduler_class import NEEDED_BY, check_scheduler_flags, check_scheduler_model

EXAMPLES = Path(__file__).parents[3] / "examples"
OWN = ["prefill_first:PrefillFirst", "round_robin:RoundRobin", "tests.lab.conformance.one_at_a_time:OneAtATime"]
PLAIN = "tests.lab.conformance.faulty:Plain"
PROMPTS = ["Good morning!", "Tell me a long story of a mill and its sacks. " * 8, "Who are you?", "Good morning!"]


class Half(SchedulerInterface):
    """Has begun to be a scheduler."""

    def has_work(self) -> bool:
        return False


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def texts(log: Path | None = None, **overrides: object) -> list[str]:
    llm = LLM(max_num_batched_tokens=64, max_num_seqs=3, step_log=None if log is None else str(log), **overrides)
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0.0))
    llm.close()
    return [output.outputs[0].text for output in outputs]


@pytest.fixture(scope="module")
def plain_texts() -> list[str]:
    return texts()


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("overlap", [False, True])
def test_it_serves_the_same_greedy_texts_and_its_log_replays(
    name: str, overlap: bool, plain_texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert texts(tmp_path / "log", scheduler_cls=name, async_scheduling=overlap) == plain_texts
    assert main(["replay", str(tmp_path / "log")]) == 0
    assert "all identical" in capsys.readouterr().out


def test_a_log_of_one_without_policies_is_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts(tmp_path / "log", scheduler_cls=OWN[0])
    assert main(["replay", str(tmp_path / "log"), "--batch-policy", "mixed"]) != 0
    assert f"{OWN[0]} does not serve policies of batches and admission" in capsys.readouterr().err


def test_it_is_found_by_the_name_of_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "robin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: robin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tokenmill.schedulers]\nrobin = round_robin:RoundRobin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_scheduler("robin").__name__ == "RoundRobin"
    assert find_scheduler("") is Scheduler


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no.such.module:Class", "cannot be imported"),
        ("round_robin:NoSuchName", "cannot be imported"),
        ("round_robin:Counter", "is not a class of the kind SchedulerInterface"),
        ("robin", "must be an entry point of tokenmill.schedulers or module:Class, got 'robin'"),
        (f"{__name__}:Half", "the class lacks __init__, abort, add, commit"),
    ],
)
def test_what_is_no_scheduler_is_refused_with_a_sentence(name: str, sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        find_scheduler(name)


OTHER = {
    "scheduling_policy": "fcfs",
    "batch_policy": "prefill-first",
    "admission": "reserve",
    "enable_chunked_prefill": False,
    "pipeline_parallel_size": 2,
    "speculative_config": '{"method": "ngram"}',
    "kv_disk": "/nowhere",
    "slot_save_path": "/nowhere",
    "kv_host_size": 1 << 20,
    "kv_source": "module:name",
    "kv_transfer_config": '{"kv_connector": "NixlConnector"}',
    "encoder_store": "/nowhere",
    "encoder_urls": ("http://nowhere:1",),
    "ec_transfer_config": '{"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}',
    "enable_lora": True,
}


@pytest.mark.parametrize("name", NEEDED_BY)
def test_a_flag_that_needs_what_a_class_lacks_is_refused_by_name(name: str) -> None:
    config = EngineConfig(scheduler_cls=OWN[2], **{name: OTHER[name]})  # type: ignore[arg-type]
    flag = "--no-enable-chunked-prefill" if name == "enable_chunked_prefill" else f"--{name.replace('_', '-')}"
    with pytest.raises(InvalidConfig) as refusal:
        check_scheduler_flags(config)
    sentence = f"{flag} needs {NEEDED_BY[name]}, which --scheduler-cls {OWN[2]} does not serve"
    assert str(refusal.value) == sentence
    check_scheduler_flags(EngineConfig(**{name: OTHER[name]}))  # type: ignore[arg-type]


def test_queues_of_the_base_have_the_order_of_the_policy() -> None:
    assert Feature.ORDER in Plain.serves
    check_scheduler_flags(EngineConfig(scheduler_cls=PLAIN, scheduling_policy="priority"))


@pytest.mark.parametrize(
    ("feature", "fields"),
    [
        (Feature.BACKGROUND, {"is_background": True}),
        (Feature.SESSIONS, {"is_resumable": True}),
        (Feature.ADAPTERS, {"adapter": AdapterRef("a", "", "digest")}),
        (Feature.REPORTS, {"pooling": PoolingParams()}),
        (Feature.REPORTS, {"params": SamplingParams(prompt_logprobs=1)}),
    ],
)
def test_a_request_that_needs_what_a_class_lacks_is_refused(feature: Feature, fields: dict[str, object]) -> None:
    message = AddRequest(**{"id": "0", "prompt_token_ids": [1], "params": SamplingParams()} | fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match=f"OneAtATime, does not serve {feature}"):
        check_served(message, [feature], OneAtATime)
    check_served(message, frozenset(Feature) - {feature}, OneAtATime)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", OWN[:2])
def test_grammars_are_kept_by_those_that_serve_them(name: str, overlap: bool) -> None:
    params = SamplingParams(
        max_tokens=30, temperature=0.0, structured_outputs=StructuredOutputs(regex="(yes|no), [0-9]{4,9} sacks")
    )
    brought = []
    for scheduler_cls in ("", name):
        llm = LLM(scheduler_cls=scheduler_cls, async_scheduling=overlap, max_num_batched_tokens=64, max_num_seqs=3)
        brought.append([output.outputs[0].text for output in llm.generate(PROMPTS, params)])
        llm.close()
    assert brought[0] == brought[1]
    assert all(text.endswith(" sacks") for text in brought[0])


def test_a_session_is_refused_where_it_is_not_served() -> None:
    llm = LLM(scheduler_cls=PLAIN)
    with pytest.raises(InvalidRequest, match="Plain, does not serve sessions"):
        llm.session().send("Hello", SamplingParams(max_tokens=2))
    llm.close()


def test_a_model_with_states_is_refused_where_they_are_not_served() -> None:
    model = SimpleNamespace(name="LFM2", recurrences=("conv",), spans_see_ahead=False)
    with pytest.raises(InvalidConfig, match=f"LFM2 has recurrent states, which --scheduler-cls {PLAIN} does not serve"):
        check_scheduler_model(EngineConfig(scheduler_cls=PLAIN), model, None)  # type: ignore[arg-type]
    check_scheduler_model(EngineConfig(), model, None)  # type: ignore[arg-type]
