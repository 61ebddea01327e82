"""The engine on a device with a queue of its own: the CPU's tokens, with graphs and without, one wait per step."""

from __future__ import annotations

import gc
import json
import random
import re
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import torch

from tests.checkpoints import greedy_continuation, load_oracle, make_checkpoint, smallest_margin
from tests.engine.runner.fake_platform import FakePlatform
from tests.model.kernels.gpu import DEVICE
from tests.model.weights.test_stacked_experts import packed
from tests.seeding import seed_for
from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import EngineFailed, InvalidConfig
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.plan import StepOutcome, StepPlan
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.startup.assembly.setup import build_engine

SEED = seed_for(__name__)
NUM_TOKENS = 4
LAYER_TYPES = ["sliding_attention", "full_attention"]
SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 277, "num_hidden_layers": 1}
SMALL = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 64, "page_size": 4, "num_pages": 60}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="with a GPU tools/gpu_check.py runs this on the GPU itself")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    print(f"seed {SEED}")
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", seed=SEED, **SHAPE)


@pytest.fixture(scope="module")
def cases(model: Path) -> tuple[list[list[int]], list[list[int]]]:
    return make_cases(model)


def make_cases(model: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, one of which needs several chunks, and transformers' greedy continuations."""
    generator, oracle = random.Random(SEED), load_oracle(model)
    prompts: list[list[int]] = []
    expected: list[list[int]] = []
    while len(prompts) < 3:
        prompt = [generator.randrange(250) for _ in range((6, 1, 20)[len(prompts)])]
        output = greedy_continuation(oracle, prompt, NUM_TOKENS)
        if smallest_margin(oracle, prompt, output) > 1e-3:
            prompts.append(prompt)
            expected.append(output)
    return prompts, expected


@contextmanager
def running(model: Path, platform: FakePlatform | None, **options: Any) -> Iterator[Engine]:
    config = EngineConfig(model=str(model), num_threads=1, device="cpu", **{"dtype": "float32", **SMALL, **options})
    engine = build_engine(config.resolve(), platform=platform).engine
    try:
        yield engine
    finally:
        engine.close()


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {str(number): [] for number in range(len(prompts))}
    for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        engine.add(AddRequest(id=str(number), prompt_token_ids=prompt, params=own))
    while engine.has_work:
        for output in engine.step():
            outputs[output.id].append(output)
    return list(outputs.values())


def tokens(outputs: list[list[TokenOutput]]) -> list[list[int]]:
    return [[token for output in each for token in output.token_ids] for each in outputs]


def assert_near(got: Any, want: Any) -> None:
    """Log probabilities in lists and structs: the same tokens and ranks, numbers to three places."""
    if isinstance(want, float):
        assert got == pytest.approx(want, abs=1e-3), f"seed {SEED}"
    elif isinstance(want, msgspec.Struct):
        assert_near(msgspec.structs.astuple(got), msgspec.structs.astuple(want))
    elif isinstance(want, list | tuple):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_near(one, other)
    else:
        assert got == want, f"seed {SEED}"


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"enforce_eager": True},
        {"batch_invariant": True},
        {"num_pages": 8, "max_model_len": 28, "async_scheduling": True},
    ],
    ids=["graphs and overlap", "eager", "invariant", "preemption"],
)
def test_greedy_tokens_equal_transformers(model: Path, cases: Any, options: dict[str, Any]) -> None:
    prompts, expected = cases
    platform = FakePlatform()
    with running(model, platform, **options) as engine:
        before = platform.replays
        assert tokens(run(engine, prompts, [GREEDY] * 3)) == expected, f"seed {SEED}"
        assert (engine.stats().num_preemptions > 0) == ("num_pages" in options)
    assert (platform.replays > before) == (not options.get("enforce_eager"))
    assert platform.captured == ([] if options.get("enforce_eager") else [3, 2, 1])


def test_a_closed_engine_leaves_no_tensor_to_the_garbage_collector(model: Path) -> None:
    """On a device the next engine could not be built beside what the last one held."""
    gc.collect()
    gc.disable()
    try:
        before = {id(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)}
        with running(model, FakePlatform()) as engine:
            run(engine, [[1, 2, 3]], [GREEDY])
            tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and id(each) not in before]
            held = [weakref.ref(each) for each in tensors if each.numel() > 100]
            del tensors
        del engine
        assert len(held) > 10
        assert [tuple(kept().shape) for kept in held if kept() is not None] == []
    finally:
        gc.enable()


def test_a_mixture_of_experts_is_captured_too(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "qwen3_moe", seed=SEED, **SHAPE, num_experts=4)
    prompts, expected = make_cases(model)
    with running(model, FakePlatform(), async_scheduling=True) as engine:
        assert tokens(run(engine, prompts, [GREEDY] * 3)) == expected, f"seed {SEED}"


@pytest.mark.parametrize("family", ["gemma3", "phi3", "gpt_oss", "olmo2"])
def test_families_with_parts_of_their_own(family: str, tmp_path: Path) -> None:
    layer_types = {} if family in ("phi3", "olmo2") else {"layer_types": LAYER_TYPES}
    model = make_checkpoint(tmp_path, family, seed=SEED, num_hidden_layers=2, **layer_types)
    prompts, expected = make_cases(model)
    with running(model, FakePlatform(), async_scheduling=True) as engine:
        assert tokens(run(engine, prompts, [GREEDY] * 3)) == expected, f"seed {SEED}"


def test_beginnings_of_pages_are_copied(model: Path, rng: np.random.Generator) -> None:
    options = {"page_size": 32, "max_model_len": 128, "num_pages": 20}
    first = rng.integers(0, 250, 70).tolist()
    prompts = [[*first[:cut], *rng.integers(0, 250, 9).tolist()] for cut in (25, 60)]
    with running(model, None, enable_prefix_caching=False, **options) as engine:
        expected = tokens(run(engine, prompts, [GREEDY] * 2))
    with running(model, FakePlatform(), **options) as engine:
        run(engine, [first], [GREEDY])
        outputs = run(engine, prompts, [GREEDY] * 2)
        assert all(each[0].num_cached_tokens >= cut for each, cut in zip(outputs, (25, 60), strict=True))
        assert engine.stats().prefix_partial_hits == sum(each[0].num_cached_tokens % 32 for each in outputs)
    assert tokens(outputs) == expected, f"seed {SEED}"


@pytest.mark.parametrize(("family", "kind"), [("lfm2", "conv"), ("qwen3_next", "linear_attention")])
def test_recurrent_states_run_on_in_graphs(family: str, kind: str, tmp_path: Path) -> None:
    """From kept states too, and kept in passing: by decodes in a graph, and by chunks beside them."""
    model = make_checkpoint(tmp_path, family, seed=SEED, num_hidden_layers=2, layer_types=[kind, "full_attention"])
    generator, device, found = random.Random(SEED), FakePlatform(), []
    prompts = [[generator.randrange(250) for _ in range(length)] for length in (6, 17)]
    params = [SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in (4, 3)]
    for platform in (None, device):
        with running(model, platform, async_scheduling=platform is not None, max_num_seqs=2) as engine:
            first = tokens(run(engine, prompts, params))
            turns = [prompt + output for prompt, output in zip(prompts, first, strict=True)]
            found.append([first, tokens(run(engine, turns, params))])
            assert engine.stats().num_state_hits > 0, "a second turn begins behind the first"
    assert found[1] == found[0], f"seed {SEED}"
    assert device.captured == [2, 1]
    assert device.replays > 4


def test_experts_in_four_bits_stay_so_on_a_device(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "gpt_oss", seed=SEED, num_hidden_layers=2, layer_types=LAYER_TYPES)
    rng, oracle = np.random.default_rng(SEED), load_oracle(model)
    for name, values in packed(model, rng).items():
        oracle.get_parameter(name).data.copy_(values)
    prompts = [rng.integers(0, 250, length).tolist() for length in (6, 1, 20)]
    expected = [greedy_continuation(oracle, prompt, NUM_TOKENS) for prompt in prompts]
    with running(model, FakePlatform(), async_scheduling=True) as engine:
        found = tokens(run(engine, prompts, [GREEDY] * 3))
    for prompt, own, wanted in zip(prompts, found, expected, strict=True):
        if smallest_margin(oracle, prompt, wanted) > 1e-3:
            assert own == wanted, f"seed {SEED}"


def test_experts_in_a_loop_are_not_captured(tmp_path: Path) -> None:
    """The host reads how many tokens each has, which a graph cannot hold."""
    prompt = random.Random(SEED).choices(range(250), k=5)
    model = make_checkpoint(tmp_path, "qwen3_moe", seed=SEED, **SHAPE, num_experts=4)
    found, device = [], FakePlatform()
    for platform in (None, device):
        with running(model, platform, kernels="torch") as engine:
            found.append(tokens(run(engine, [prompt], [GREEDY])))
    assert found[0] == found[1], f"seed {SEED}"
    assert device.captured == []


def test_the_host_waits_once_a_step(model: Path, cases: Any) -> None:
    platform = FakePlatform()
    with running(model, platform, async_scheduling=True) as engine:
        steps, waits = engine.stats().step, len(platform.host_waits)
        run(engine, cases[0], [SamplingParams(temperature=0.7, max_tokens=4, ignore_eos=True, top_p=0.9)] * 3)
        steps = engine.stats().step - steps
        # One for the result of a step; one more before its slot is filled again, which by then has come to pass.
        own = platform.host_waits[waits:]
        results = list(dict.fromkeys(own))
        assert steps - 1 <= len(results) <= steps + 3
        assert all(own.count(event) <= 2 for event in results)


def test_all_that_sampling_offers_gives_the_tokens_of_the_cpu(model: Path, cases: Any) -> None:
    params = [
        SamplingParams(temperature=0.8, top_k=5, seed=1, max_tokens=4, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=1.0, seed=2, max_tokens=4, ignore_eos=True, presence_penalty=0.5, min_p=0.01),
        SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logit_bias={7: 3.0}, prompt_logprobs=1),
    ]
    found = []
    for platform in (None, FakePlatform()):
        with running(model, platform) as engine:
            found.append(run(engine, cases[0], params))
    assert tokens(found[1]) == tokens(found[0]), f"seed {SEED}"
    for want, got in zip(found[0][0], found[1][0], strict=True):
        assert_near(got.logprobs, want.logprobs)
    assert_near(found[1][2][0].prompt_logprobs, found[0][2][0].prompt_logprobs)


def test_decodes_beside_prompts_run_in_a_graph_and_draw_what_one_pass_draws(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(SEED)
    prompts = [[generator.randrange(250) for _ in range(length)] for length in (2, 1, 10)]
    params = [
        SamplingParams(temperature=0.8, top_k=5, seed=1, max_tokens=5, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=1.0, seed=2, max_tokens=5, ignore_eos=True, presence_penalty=0.5),
        SamplingParams(temperature=0.9, seed=4, max_tokens=2, ignore_eos=True, logprobs=1),
    ]
    found, mixed = [], Counter[tuple[int, int]]()
    for number, most_bytes in enumerate((1 << 40, 0)):
        platform = FakePlatform()
        monkeypatch.setattr("tokenmill.startup.assembly.device_runners.TWICE_READ_BYTES", most_bytes)
        with running(model, platform, max_num_batched_tokens=6, async_scheduling=True) as engine:

            def launch(plan: StepPlan, launch: Any = engine.executor.launch, platform: Any = platform) -> StepOutcome:
                before = platform.replays
                outcome = launch(plan)
                if plan.num_scheduled[0] == 1 < plan.num_scheduled.max():
                    mixed[number, platform.replays - before] += 1  # noqa: B023
                return outcome

            engine.executor.launch = launch
            found.append(run(engine, prompts, params))
    assert mixed[0, 1] > 1, "parts"
    assert mixed[1, 0] > 1, "one pass, for a model whose weights are too large to be read twice"
    assert len(mixed) == 2
    assert tokens(found[1]) == tokens(found[0]), f"seed {SEED}"
    for want, got in zip(found[0], found[1], strict=True):
        assert_near([each.logprobs for each in got], [each.logprobs for each in want])


def test_a_grammar_beside_requests_without_one(model: Path, cases: Any) -> None:
    """Its mask needs the token before: the host waits for that step, and the others' tokens stay what they were."""
    prompts, expected = cases
    grammar = Grammar(json.dumps({"grammars": [{"lark_grammar": "start: /[ab]{6}/"}]}), "structured_outputs")
    constrained = SamplingParams(temperature=1.0, seed=3, max_tokens=12, grammar=grammar)
    with running(model, FakePlatform(), async_scheduling=True) as engine:
        outputs = tokens(run(engine, prompts, [GREEDY, constrained, GREEDY]))
    assert [outputs[0], outputs[2]] == [expected[0], expected[2]]
    text = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json")).decode(outputs[1])
    assert re.fullmatch("[ab]{6}", text), text


def test_a_grammar_gives_the_tokens_of_the_cpu(model: Path, cases: Any) -> None:
    """There a mask may never be filled, here it always is: what is drawn follows one rule."""
    grammar = Grammar(json.dumps({"grammars": [{"lark_grammar": "start: /[a-p]{3}/"}]}), "structured_outputs")
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 1.0, "presence_penalty": 1.0, "logit_bias": {70: 2.0}, "logprobs": 1},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 200},
    ]
    params = [
        SamplingParams(seed=seed, max_tokens=NUM_TOKENS, grammar=grammar, **kind) for seed, kind in enumerate(kinds)
    ]
    found = []
    for platform in (None, FakePlatform()):
        with running(model, platform, enforce_eager=platform is not None) as engine:
            found.append(run(engine, [cases[0][0]] * len(params), params))
    assert tokens(found[1]) == tokens(found[0]), f"seed {SEED}"


class Broken:
    def forward(self, *args: Any) -> torch.Tensor:
        raise RuntimeError("the device is gone")


def test_a_failed_step_ends_its_requests_and_no_others(model: Path, cases: Any) -> None:
    prompts, expected = cases
    with running(model, FakePlatform(), async_scheduling=True, enforce_eager=True) as engine:
        runner = engine.executor.runner
        working, runner.model = runner.model, Broken()
        outputs = run(engine, prompts[:1], [GREEDY])
        assert outputs[0][-1].error is not None
        runner.model = working
        assert tokens(run(engine, prompts[1:], [GREEDY] * 2)) == expected[1:]


def test_a_dead_device_ends_the_engine(model: Path) -> None:
    class DeadPlatform(FakePlatform):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

    with running(model, DeadPlatform(), async_scheduling=True, enforce_eager=True) as engine:
        engine.executor.runner.model = Broken()
        with pytest.raises(EngineFailed, match="unspecified launch failure"):
            run(engine, [[1, 2, 3]], [GREEDY])


def test_an_old_gpu_is_told_what_it_lacks(model: Path) -> None:
    class OldPlatform(FakePlatform):
        def capability(self) -> tuple[int, int]:
            return 7, 5

    for options in ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "fp8"}):
        with (
            pytest.raises(InvalidConfig, match=r"capability 8.0, this one has 7.5"),
            running(model, OldPlatform(), **options),
        ):
            pass


def test_what_needs_a_gpu_is_refused_on_a_cpu(model: Path) -> None:
    for options in ({"batch_invariant": True}, {"quantization": "fp8"}, {"all_reduce": "one-shot"}):
        with pytest.raises(InvalidConfig, match="GPU"), running(model, None, **options):
            pass


def test_eager_on_a_cpu_is_accepted_with_one_line(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with running(model, None, enforce_eager=True):
        pass
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "--enforce-eager changes nothing on a CPU"
    ]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kernels": "native"}, "--kernels native does not run on"),
        ({"quantization": "fp8"}, "--quantization fp8 needs --dtype bfloat16"),
        ({"quantization": "fp8", "dtype": "bfloat16", "kernels": "torch"}, "fp8 needs the kernels for GPUs"),
        ({"quantization": "int8"}, "a GPU has fp8"),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8 is for CPUs"),
        ({"kernels": "torch", "batch_invariant": True}, "--batch-invariant cannot be combined with --kernels torch"),
        ({"attention_backend": "cpu"}, "--attention-backend cpu is unknown on fake"),
    ],
)
def test_what_does_not_go_together_is_refused(model: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason), running(model, FakePlatform(), **options):
        pass
