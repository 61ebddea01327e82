"""Qwen3-VL with experts: transformers' answers, from stacks in either order and from two files; published sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.model.vision.test_llm import GREEDY, answer_of, chat, picture, tokens
from tests.model.weights.mmproj_writer import write_decoder, write_mmproj
from tests.vision_checkpoints import load_vision_oracle, make_moe_checkpoint
from tokenmill import LLM, SamplingParams
from tokenmill.model.kernels.native import load_kernels
from tokenmill.model.models.architecture_config import read_architecture

OPTIONS = {"dtype": "float32", "num_pages": 100, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe_checkpoint(tmp_path_factory.mktemp("qwen3-vl-moe"))


def test_answers_are_those_of_transformers_from_stacks_in_either_order(
    checkpoint: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    oracle, images = load_vision_oracle(checkpoint), [picture(rng, 70, 120), picture(rng, 40, 90)]
    chats = [chat("two: ", images[0], " and ", images[1], "?"), chat("no image")]
    with LLM(checkpoint, max_num_batched_tokens=16, **OPTIONS) as llm:
        outputs = llm.chat(chats, GREEDY)
    for output, shown in zip(outputs, (images, []), strict=True):
        assert tokens(output) == answer_of(oracle, output.prompt_token_ids, shown)
    # As published: inputs stand before outputs.
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    flipped = {
        name: values.transpose(1, 2).contiguous() if ".experts." in name else values
        for name, values in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(flipped, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with LLM(tmp_path, **OPTIONS) as llm:
        assert [tokens(output) for output in llm.chat(chats, GREEDY)] == [tokens(output) for output in outputs]


def test_two_files_give_the_answers_of_the_checkpoint(
    checkpoint: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    write_decoder(checkpoint, tmp_path / "model-F32.gguf")
    write_mmproj(checkpoint, tmp_path / "mmproj-F32.gguf")
    (tmp_path / "preprocessor_config.json").write_bytes((checkpoint / "preprocessor_config.json").read_bytes())
    asked, found = chat("this: ", picture(rng, 70, 120), "?"), []
    for model in (checkpoint, tmp_path / "model-F32.gguf"):
        with LLM(str(model), download_dir=str(tmp_path / "cache"), **OPTIONS) as llm:
            found.append(tokens(llm.chat(asked, GREEDY)[0]))
    assert found[0] == found[1]


@pytest.mark.skipif(load_kernels(1) is None, reason="the native kernels are not built here")
def test_native_bits_do_not_depend_on_steps(tmp_path: Path, rng: np.random.Generator) -> None:
    folder, image = make_moe_checkpoint(tmp_path, dtype=torch.bfloat16), picture(rng, 70, 120)
    chats, params = [chat("this: ", image, "?"), chat("hello")], SamplingParams(max_tokens=9, temperature=0, logprobs=1)
    found = []
    for tokens_in_step in (512, 16):
        options = {"dtype": "bfloat16", "kernels": "native", "num_pages": 60, "page_size": 16, "max_num_seqs": 4}
        with LLM(folder, max_num_batched_tokens=tokens_in_step, **options) as llm:
            outputs = llm.chat(chats, params)
        found.append([(one.token_ids, one.logprobs) for output in outputs for one in output.outputs])
    assert found[0] == found[1]


def test_the_sizes_of_the_published_model() -> None:
    text = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    }
    with torch.device("meta"):
        config = transformers.Qwen3VLMoeConfig(text_config=text, tie_word_embeddings=False)
        theirs = transformers.Qwen3VLMoeForConditionalGeneration(config)
    fields = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": text, "vision_config": {}}
    own = read_architecture(fields)
    tower = sum(one.numel() for one in theirs.model.visual.parameters())
    assert own.takes_images
    assert own.num_parameters() == theirs.num_parameters() - tower
