"""Small random checkpoints of Qwen3-VL, Qwen2.5-VL and Gemma 3, and transformers' answers on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints import VOCAB_SIZE, make_tokenizer, randomize

MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
MIN_PIXELS, MAX_PIXELS, MAX_VIDEO_PIXELS = 32 * 32, 96 * 96, 6 * 64 * 96
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% elif part['type'] == 'video' %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def make_moe_checkpoint(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """Write the same with experts."""
    return make_vision_checkpoint(folder, seed, dtype, has_experts=True)


def make_vision_checkpoint(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, *, has_experts: bool = False, **more: Any
) -> Path:
    """Write a checkpoint of four text layers and a tower of four blocks, with tokenizer, template and processor.

    Args:
        more: of the text model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = make_tokenizer(folder, VOCAB_SIZE)
    ids = add_marks(folder)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {
        "vocab_size": VOCAB_SIZE + len(MARKS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["<|endoftext|>"],
    }
    tower = {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1, 2],
    }
    kind = "Qwen3VLMoe" if has_experts else "Qwen3VL"
    config = getattr(transformers, f"{kind}Config")(
        text_config=text | (EXPERTS if has_experts else {}) | more,
        vision_config=tower,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    randomize(model, seed)
    model.to(dtype).save_pretrained(folder)
    _write(folder / "generation_config.json", {"eos_token_id": [special["<|im_end|>"]]})
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS}
    video = {"size": {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_VIDEO_PIXELS}}
    _write(folder / "video_preprocessor_config.json", video)
    _write(folder / "preprocessor_config.json", {"size": size, "image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    return folder


def make_qwen25_checkpoint(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """The same of Qwen2.5-VL: windows of two by two embeddings, two blocks that see the whole image."""
    folder.mkdir(parents=True, exist_ok=True)
    special = make_tokenizer(folder, VOCAB_SIZE)
    ids = add_marks(folder)
    text = {
        "vocab_size": VOCAB_SIZE + len(MARKS),
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["<|endoftext|>"],
        "bos_token_id": None,
    }
    tower = {
        "depth": 4,
        "hidden_size": 64,
        "intermediate_size": 90,
        "num_heads": 4,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1, 3],
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    randomize(model, seed)
    model.to(dtype).save_pretrained(folder)
    _write(folder / "generation_config.json", {"eos_token_id": [special["<|im_end|>"]]})
    _write(folder / "preprocessor_config.json", {"min_pixels": 28 * 28, "max_pixels": 140 * 140})
    return folder


GEMMA_MARKS = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
GEMMA_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<start_of_image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GEMMA_SIDE, GEMMA_TOKENS = 84, 9


def make_gemma3_checkpoint(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    """The same of Gemma 3: an image of nine tokens, more than a window sees; averages of two by two patches.

    Args:
        more: of the text model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = make_tokenizer(folder, VOCAB_SIZE)
    ids = add_marks(folder, GEMMA_MARKS, GEMMA_TEMPLATE)
    text = {
        "vocab_size": VOCAB_SIZE + len(GEMMA_MARKS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "max_position_embeddings": 512,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": special["<|endoftext|>"],
        "bos_token_id": None,
    }
    tower = {
        "hidden_size": 48,
        "intermediate_size": 90,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": GEMMA_SIDE,
        "patch_size": 14,
    }
    start, end, image = (ids[mark] for mark in GEMMA_MARKS)
    config = transformers.Gemma3Config(
        text_config=text | more,
        vision_config=tower,
        mm_tokens_per_image=GEMMA_TOKENS,
        boi_token_index=start,
        eoi_token_index=end,
        image_token_index=image,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    randomize(model, seed)
    model.to(dtype).save_pretrained(folder)
    _write(folder / "generation_config.json", {"eos_token_id": [special["<|im_end|>"]]})
    size = {"height": GEMMA_SIDE, "width": GEMMA_SIDE}
    processor = {"size": size, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_pan_and_scan": None}
    _write(folder / "preprocessor_config.json", processor)
    return folder


GEMMA4_TEMPLATE = GEMMA_TEMPLATE.replace("<start_of_image>", "<image_soft_token>")
GEMMA4_TOKENS = 70


GEMMA4_LARGE: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "use_bidirectional_attention": "vision",
}
"""Fields of the text model in which a 26B-A4B differs."""


def make_gemma4_checkpoint(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, *, clips: bool = True, **more: Any
) -> Path:
    """The same of Gemma 4: per-layer embeddings, axial blocks with bounds, images of 70 tokens at most.

    Args:
        clips: the tower's matrices have bounds.
        more: of the text model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = make_tokenizer(folder, VOCAB_SIZE)
    ids = add_marks(folder, GEMMA_MARKS, GEMMA4_TEMPLATE)
    size = VOCAB_SIZE + len(GEMMA_MARKS)
    text = {
        "vocab_size": size,
        "vocab_size_per_layer_input": size,
        "hidden_size_per_layer_input": 16,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 1,
        "max_position_embeddings": 512,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "use_bidirectional_attention": None,
        "eos_token_id": special["<|im_end|>"],
        "pad_token_id": 5,
        "bos_token_id": None,
    }
    tower = {
        "hidden_size": 40,
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "position_embedding_size": 256,
        "use_clipped_linears": clips,
        "standardize": True,
    }
    start, end, image = (ids[mark] for mark in GEMMA_MARKS)
    config = transformers.Gemma4Config(
        text_config=text | more,
        vision_config=tower,
        audio_config=None,
        boi_token_id=start,
        eoi_token_id=end,
        image_token_id=image,
    )
    model = transformers.Gemma4ForConditionalGeneration(config)
    randomize(model, seed)
    draws = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):  # some inputs and outputs are cut
            bound = 1.0 + float(torch.rand((), generator=draws))
            buffer.fill_(bound if name.endswith("_max") else -bound)
        elif "std_" in name:
            buffer.copy_(torch.rand(buffer.shape, generator=draws) + 0.5)
    model.to(dtype).save_pretrained(folder)
    _write(folder / "generation_config.json", {"eos_token_id": [special["<|im_end|>"]]})
    image_processor = {"max_soft_tokens": GEMMA4_TOKENS, "patch_size": 16, "pooling_kernel_size": 3, "resample": 3}
    _write(folder / "processor_config.json", {"image_processor": image_processor | {"do_normalize": False}})
    return folder


def load_vision_oracle(folder: Path) -> transformers.PreTrainedModel:
    """The checkpoint as a transformers model: float32, eager attention, eval mode."""
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def add_marks(folder: Path, marks: Sequence[str] = MARKS, template: str = TEMPLATE) -> dict[str, int]:
    """Add special tokens to a tokenizer, behind all others, and a chat template; return their ids."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    taken = {token["id"] for token in tokenizer["added_tokens"]} | set(tokenizer["model"]["vocab"].values())
    first = max(taken) + 1
    for number, mark in enumerate(marks):
        like = dict(tokenizer["added_tokens"][0])
        tokenizer["added_tokens"].append(like | {"id": first + number, "content": mark})
    _write(folder / "tokenizer.json", tokenizer)
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    _write(folder / "tokenizer_config.json", config | {"chat_template": template})
    return {mark: first + number for number, mark in enumerate(marks)}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
