"""A model that brings forth NaN for some prompts: those end with status 500, whatever they ask for, and no others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.runner.fake_platform import FakePlatform
from tests.model.kernels.gpu import DEVICE
from tests.seeding import seed_for
from tokenmill.config.configs import EngineConfig
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.core.pooling import PoolingParams, PoolMode
from tokenmill.core.request import FinishReason
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.engine.loop.engine import Engine
from tokenmill.startup.assembly.setup import build_engine

SEED = seed_for(__name__)
# A prompt with this token makes NaN of all that follows.
POISON = 7
LETTERS = Grammar(json.dumps({"grammars": [{"lark_grammar": "start: /[a-p]{6}/"}]}), "structured_outputs")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0, "logprobs": 2},
    "filtered": {"top_p": 0.9, "top_k": 50},
    "penalized": {"temperature": 0.0, "presence_penalty": 1.0, "logit_bias": {3: 1.0}},
    "ruled": {"allowed_token_ids": (3, 5, 9, 64), "bad_word_ids": ((3, 5),), "min_tokens": 2},
    "greedy grammar": {"temperature": 0.0, "grammar": LETTERS},
    "plain grammar": {"grammar": LETTERS, "min_tokens": 2},
    "filtered grammar": {"top_p": 0.9, "grammar": LETTERS},
    "prompt": {"temperature": 0.0, "prompt_logprobs": 1},
    "last": {"temperature": 0.0},
    "mean": {"temperature": 0.0},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return poisoned(make_checkpoint(tmp_path_factory.mktemp("poisoned"), "qwen3", seed=SEED))


def poisoned(folder: Path) -> Path:
    """The checkpoint with an embedding that is NaN."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@contextmanager
def running(model: Path, platform: FakePlatform | None = None, **options: Any) -> Iterator[Engine]:
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "page_size": 4, "num_pages": 120}
    sizes["max_model_len"] = 64
    config = EngineConfig(model=str(model), num_threads=1, device="cpu", **{**sizes, **options})
    engine = build_engine(config.resolve(), platform=platform).engine
    try:
        yield engine
    finally:
        engine.close()


def requests(rng: random.Random, kinds: list[str]) -> list[AddRequest]:
    """One of each kind with a prompt that is well, and one with the same prompt and a poisoned token in it."""
    made = []
    for kind in kinds:
        prompt = [rng.randrange(10, 250) for _ in range(rng.choice([3, 9, 27]))]
        for name, tokens in (("well", prompt), ("ill", [*prompt[:2], POISON, *prompt[2:]])):
            pooling = PoolingParams(modes=(PoolMode(kind),)) if kind in ("last", "mean") else None
            # A vector ends its request, as at the server's routes: it goes out in place of the first token.
            sizes = {"max_tokens": 1 if pooling else 3}
            params = SamplingParams(**{"temperature": 1.0, "seed": 3, **sizes, **KINDS[kind]})
            made.append(AddRequest(id=f"{kind}, {name}", prompt_token_ids=tokens, params=params, pooling=pooling))
    return made


def run(engine: Engine, wanted: list[AddRequest]) -> dict[str, list[TokenOutput]]:
    outputs: dict[str, list[TokenOutput]] = {request.id: [] for request in wanted}
    for request in wanted:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.id].append(output)
    return outputs


def tokens(outputs: dict[str, list[TokenOutput]], wanted: list[AddRequest]) -> list[list[int]]:
    return [[token for output in outputs[request.id] for token in output.token_ids] for request in wanted]


def check(engine: Engine, kinds: list[str]) -> None:
    print(f"seed {SEED}")
    rng, expected = random.Random(SEED), [[POISON]]
    while any(POISON in output for output in expected):  # which would make those ill that are well
        wanted = requests(rng, kinds)
        expected = tokens(run(engine, wanted[::2]), wanted[::2])
    before = engine.stats().num_corrupted
    outputs = run(engine, wanted)
    for request in wanted[1::2]:
        end = outputs[request.id][-1]
        assert (end.finish_reason, end.error_status) == (FinishReason.ERROR, 500), request.id
        assert end.error is not None and "NaN or infinite" in end.error
        # A chunk of the prompt may have been told before the one that is ill.
        assert not any(output.token_ids or output.logprobs or output.embedding for output in outputs[request.id])
    assert engine.stats().num_corrupted - before == len(kinds)
    assert not any(output.error for request in wanted[::2] for output in outputs[request.id])
    assert tokens(outputs, wanted[::2]) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("overlap", [False, True])
def test_they_end_with_an_error_and_the_others_keep_their_tokens(model: Path, dtype: str, overlap: bool) -> None:
    options = {"enable_prefix_caching": False} if dtype == "float32" else {}
    with running(model, dtype=dtype, async_scheduling=overlap, **options) as engine:
        check(engine, list(KINDS))


@pytest.mark.skipif(DEVICE != "cpu", reason="interpreted")
@pytest.mark.parametrize(
    ("kind", "options"),
    [("ruled", {"enforce_eager": True}), ("greedy", {"async_scheduling": True})],
    ids=["eager", "graphs"],
)
def test_on_a_device_too(model: Path, kind: str, options: dict[str, Any]) -> None:
    with running(model, FakePlatform(), dtype="float32", max_num_seqs=2, **options) as engine:
        check(engine, [kind])


@pytest.mark.parametrize("platform", [None, FakePlatform], ids=["cpu", "device"])
def test_what_a_request_rules_out_itself_is_its_own_fault(model: Path, platform: type | None) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=5, allowed_token_ids=(5,), bad_word_ids=((5,),))
    eager = {"enforce_eager": True} if platform else {}
    with running(model, platform and platform(), dtype="float32", **eager) as engine:
        (end,) = run(engine, [AddRequest(id="0", prompt_token_ids=[1, 2], params=params)])["0"]
        assert (end.finish_reason, end.error_status) == (FinishReason.ERROR, 400)
        assert end.error is not None and "allowed_token_ids" in end.error
        assert engine.stats().num_corrupted == 0
