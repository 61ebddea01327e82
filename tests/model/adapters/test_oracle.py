"""Compare adapters with peft, in several families and with every option that is supported."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints import load_oracle, make_checkpoint, nudged
from tests.model.adapters.trained import LINEARS, make_adapter
from tokenmill import LLM, LoRARequest, SamplingParams
from tokenmill.core.errors import InvalidConfig

ATTENTION = LINEARS[:4]
SIZE = {"max_model_len": 128, "num_pages": 64, "max_num_seqs": 8, "enable_lora": True, "dtype": "float32"}
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, logprobs=5, prompt_logprobs=0, ignore_eos=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "all linears": {},
    "rslora": {"use_rslora": True, "r": 3},
    "rank and alpha patterns": {
        "rank_pattern": {"q_proj": 2, r"layers.1.self_attn.v_proj": 6, "^model.layers.0.self_attn.k_proj": 1},
        "alpha_pattern": {"o_proj": 3, r".*\.1\.self_attn\.q_proj": 20},
    },
    "some layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "one layer": {"layers_to_transform": 0},
    "a regular expression": {"target_modules": r".*\.(?:0\.self_attn\.[qv]|1\.self_attn\.o)_proj"},
    "parts of fused matrices": {"target_modules": ["k_proj", "v_proj"]},
    "whole names": {"target_modules": ["model.layers.1.self_attn.q_proj"], "layers_to_transform": None},
    "embedding and head": {},
    "the head alone": {"target_modules": ["lm_head"], "r": 5},
    "all but some": {"exclude_modules": ["layers.0.self_attn.q_proj", "v_proj"]},
}


@torch.no_grad()
def assert_as_told_by(oracle: torch.nn.Module, prompt: list[int], output: Any) -> None:
    """The log probabilities of the prompt's tokens, and of the likeliest at each position after it, are the oracle's.

    How much becomes of a rounding depends on weights and prompt: some make ten times as much of it as others. So the
    farthest that float32 runs of the oracle are from float64 says how far a float32 may be off: one run as it is, and
    three with each weight moved by up to a unit in its last place, since a single run may be lucky.
    """
    ids = torch.tensor([prompt + list(output.outputs[0].token_ids)])
    exact = logprobs_of(copy.deepcopy(oracle).double(), ids)
    rounded = [logprobs_of(oracle, ids), *(logprobs_of(nudged(oracle), ids) for _ in range(3))]
    places = [*enumerate(output.prompt_logprobs[1:]), *enumerate(output.outputs[0].logprobs, len(prompt) - 1)]
    found = [(place, token, one.logprob) for place, position in places for token, one in position.items()]
    rows, tokens, values = map(torch.tensor, zip(*found, strict=True))
    difference = float((values.double() - exact[rows, tokens]).abs().max())
    assert difference < 1e-5 + 4 * max(float((run - exact).abs().max()) for run in rounded)


def logprobs_of(oracle: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Log probabilities [positions, vocabulary] in the oracle's own type."""
    return oracle(ids).logits[0].log_softmax(-1)


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "granite", "smollm3", "qwen3_moe", "arcee"])
def test_log_probabilities_are_those_of_peft(family: str, tmp_path: Path, rng: np.random.Generator) -> None:
    seed = int(rng.integers(2**31))
    base = make_checkpoint(tmp_path / "base", family, seed=seed)
    linears = ATTENTION if family == "qwen3_moe" else LINEARS
    some = ("all linears", "rslora", "embedding and head", "the head alone")
    options = OPTIONS if family == "qwen3" else {name: OPTIONS[name] for name in some}
    oracles: list[Any] = [load_oracle(base)]
    requests: list[LoRARequest | None] = [None]
    for number, (name, config) in enumerate(options.items()):
        folder = tmp_path / str(number)
        fields = {"target_modules": linears, **config}
        if name == "embedding and head":
            fields["target_modules"] = [*linears, "embed_tokens", "lm_head"]
        oracles.append(make_adapter(base, folder, seed + number, **fields))
        requests.append(LoRARequest(name.replace(" ", "-"), number + 1, str(folder)))
    prompt = rng.integers(3, 300, 21).tolist()
    with LLM(base, max_loras=4, **SIZE) as llm:
        outputs = llm.generate([prompt] * len(requests), GREEDY, use_tqdm=False, lora_request=requests)
    for oracle, output in zip(oracles, outputs, strict=True):
        assert_as_told_by(oracle, prompt, output)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) > 1, "adapters that change nothing"


def test_experts_and_routers_are_refused_by_name(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3_moe")
    make_adapter(base, tmp_path / "a", 1, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    with LLM(base, **SIZE) as llm, pytest.raises(ValueError, match="target_parameters is set, which is not supported"):
        llm.generate([[1, 2]], GREEDY, use_tqdm=False, lora_request=LoRARequest("a", 1, str(tmp_path / "a")))


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_a_merged_adapter_is_pefts(options: dict[str, int], tmp_path: Path, rng: np.random.Generator) -> None:
    seed, prompt = int(rng.integers(2**31)), rng.integers(3, 300, 21).tolist()
    base = make_checkpoint(tmp_path / "base", "llama", seed=seed)
    oracle = make_adapter(base, tmp_path / "adapter", seed, rank_pattern={"q_proj": 2}, use_rslora=True)
    size = {name: value for name, value in SIZE.items() if name != "enable_lora"}
    with LLM(base, lora_merge=str(tmp_path / "adapter"), **size, **options) as llm:
        (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert_as_told_by(oracle, prompt, output)


def test_packed_weights_and_kv_of_a_merged_model_are_its_own(tmp_path: Path, rng: np.random.Generator) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3", seed=int(rng.integers(2**31)))
    make_adapter(base, tmp_path / "adapter", 1)
    size = {name: value for name, value in SIZE.items() if name not in ("enable_lora", "dtype")}
    size |= {"dtype": "bfloat16", "weight_cache_dir": str(tmp_path / "weights"), "kv_disk": str(tmp_path / "kv")}
    size["kv_disk_size"] = 64 << 20
    told, params = [], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    for merge in (None, str(tmp_path / "adapter"), None):
        with LLM(base, lora_merge=merge, **size) as llm:
            (output,) = llm.generate([list(range(5, 55))], params, use_tqdm=False)
            while llm.stats().num_stored_tokens < 48 and not output.num_cached_tokens:
                llm.step()
        told.append((list(output.outputs[0].token_ids), output.num_cached_tokens > 0))
    assert told[0][0] == told[2][0] != told[1][0]
    assert [is_cached for _, is_cached in told] == [False, False, True]


def test_random_weights_have_no_adapter(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3")
    with pytest.raises(InvalidConfig, match="--lora-merge needs the weights of a model"):
        LLM(base, lora_merge="anything", load_format="dummy")
