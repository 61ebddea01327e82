"""Images on native kernels: one call a step, whose bits do not depend on how a prompt is cut, shared or preempted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from tests.model.vision.test_llm import chat, picture
from tests.vision_checkpoints import make_gemma3_checkpoint, make_vision_checkpoint
from tokenmill import LLM, SamplingParams
from tokenmill.model.kernels.native import load_kernels

pytestmark = pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")

PARAMS = SamplingParams(max_tokens=8, temperature=0.7, seed=3, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_checkpoint(tmp_path_factory.mktemp("bfloat16"), dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of an image see each other."""
    shape = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return make_gemma3_checkpoint(tmp_path_factory.mktemp("gemma"), dtype=torch.bfloat16, **shape)


def chats(rng: np.random.Generator) -> list[list[dict[str, object]]]:
    images = [picture(rng, 96, 96), picture(rng, 64, 64), picture(rng, 32, 128)]
    return [chat(one, "hello") for one in images] + [
        chat("two: ", images[1], " and ", images[0]),
        chat("none"),
        chat(images[0], "another question"),
    ]


def told(llm: LLM, asked: list[list[dict[str, object]]]) -> list[Any]:
    return [(list(one.outputs[0].token_ids), one.outputs[0].logprobs) for one in llm.chat(asked, PARAMS)]


def engine(folder: Path, **options: Any) -> LLM:
    return LLM(folder, **{"num_pages": 200, "num_threads": 1, "page_size": 16} | options)


@pytest.mark.parametrize("which", ["bfloat16", "gemma"])
@pytest.mark.parametrize(
    "form",
    [{}, {"quantization": "int8"}, {"quantization": "int4", "kv_cache_dtype": "int8"}],
    ids=["bf16", "int8", "int4"],
)
def test_bits_do_not_depend_on_how_prompts_are_cut_or_kept(
    form: dict[str, Any], which: str, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    asked, folder = chats(rng), request.getfixturevalue(which)
    with engine(folder, **form, enable_prefix_caching=False) as llm:
        assert "one call a step" in llm._local.info.kernels_reason
        alone = [told(llm, [one])[0] for one in asked]
        assert told(llm, asked) == alone
    # Less than an image, where these are cut; and few pages.
    step, few = (7, {"num_pages": 8, "max_model_len": 64})
    if which == "gemma":
        step, few = 11, {"num_pages": 12, "max_model_len": 80}
    ways: list[dict[str, Any]] = [
        {"max_num_batched_tokens": step, "max_num_seqs": 4, "encoder_budget": 9},
        {**few, "admission": "optimistic", "enable_prefix_caching": False},
        {"async_scheduling": True},
    ]
    for options in ways:
        with engine(folder, **form, **options) as llm:
            assert told(llm, asked) == alone, options
            assert told(llm, asked) == alone, f"{options}, from the cache"


@pytest.mark.parametrize("which", ["bfloat16", "gemma"])
def test_the_native_pass_is_as_close_to_float32_as_torch_is(
    which: str, rng: np.random.Generator, request: pytest.FixtureRequest
) -> None:
    """Of 150 pictures the native pass lost at most 1.7 times what torch loses in bfloat16."""
    folder = request.getfixturevalue(which)
    asked = [chat("see: ", picture(rng, 96, 64), " what is it") for _ in range(4)]
    greedy = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=0)
    found = []
    for options in ({"kernels": "torch", "dtype": "float32"}, {"kernels": "torch"}, {"kernels": "native"}):
        with engine(folder, **options) as llm:
            told_by = [one.prompt_logprobs[1:] for one in llm.chat(asked, greedy)]
            found.append([[next(iter(one.values())).logprob for one in told if one] for told in told_by])
    exact, plain, native = np.array(found)
    assert exact.shape[1] > 10
    assert np.abs(native - exact).mean() < 2 * np.abs(plain - exact).mean()


def test_text_alone_has_the_bits_of_the_plain_text_model(bfloat16: Path, tmp_path: Path) -> None:
    whole = transformers.Qwen3VLForConditionalGeneration.from_pretrained(bfloat16, dtype=torch.bfloat16)
    text = whole.config.get_text_config()
    fields = {key: value for key, value in text.to_dict().items() if key not in ("model_type", "rope_parameters")}
    rope = {"rope_type": "default", "rope_theta": text.rope_parameters["rope_theta"]}
    plain = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**fields, rope_parameters=rope)).to(torch.bfloat16)
    plain.model.load_state_dict(whole.model.language_model.state_dict())
    plain.lm_head.load_state_dict(whole.lm_head.state_dict())
    plain.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bfloat16 / name).read_bytes())
    prompts = [[5, 3, 8, 200, 7], list(range(3, 40))]
    found = []
    for folder in (tmp_path, bfloat16):
        with engine(folder) as llm:
            outputs = llm.generate(prompts, PARAMS)
            found.append([(list(one.outputs[0].token_ids), one.outputs[0].logprobs) for one in outputs])
    assert found[0] == found[1]


def test_requests_with_images_leave_those_beside_them_alone(bfloat16: Path, rng: np.random.Generator) -> None:
    words = [chat("one"), chat("and another")]
    with engine(bfloat16) as llm:
        alone = told(llm, words)
    with engine(bfloat16) as llm:
        assert told(llm, [words[0], chat(Image.new("RGB", (96, 64)), "x"), words[1]])[::2] == alone
