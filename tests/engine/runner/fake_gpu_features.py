"""Cases of the fake GPU: what a client may ask for besides plain text, where KV may lie, and forms of weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import _disable_current_modes

from tests.audio_checkpoints import RATE, make_audio_checkpoint, noise
from tests.checkpoints import make_checkpoint
from tests.embedders import make_embedder
from tests.engine.runner.fake_gpu_engines import requests, run, texts
from tests.model.vision.checks import request_of
from tests.model.weights.gguf_writer import write_gguf
from tests.model.weights.quantized_layouts import CASES, quantize
from tests.vision_checkpoints import (
    make_gemma3_checkpoint,
    make_gemma4_checkpoint,
    make_moe_checkpoint,
    make_qwen25_checkpoint,
    make_vision_checkpoint,
)
from tokenmill.core.media import MediaInput, MediaSpan, content_digest, with_surrogates
from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import Grammar
from tokenmill.engine.loop.engine import Engine
from tokenmill.engine.transfer import encoder_outputs
from tokenmill.engine.transfer.encoder_outputs import StoredOutputs
from tokenmill.engine.transfer.output_files import pack
from tokenmill.model.adapters.requests import AdapterRequests
from tokenmill.model.audio.spec import num_tokens, read_audio
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.model.weights import loader
from tokenmill.model.weights.hub import fetch

Case = Callable[[], dict[str, Any]]
# All tokens of the fake GPU are ones, which are quotation marks.
QUOTES = 'start: /"+/'
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# By adapter: modules of layers, all with embedding and head, and the head alone.
TARGETS = (("q_proj", "up_proj"), (*LINEARS, "embed_tokens", "lm_head"), ("lm_head",))
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
TOWERS: dict[str, Callable[[Path], Path]] = {
    "qwen3 vl": make_vision_checkpoint,
    "qwen3 vl of experts": make_moe_checkpoint,
    "qwen2.5 vl": make_qwen25_checkpoint,
    "gemma3": make_gemma3_checkpoint,
    "gemma4": make_gemma4_checkpoint,
}
KV_BYTES = 8 << 20


def features(folder: Path) -> dict[str, Case]:
    """Every case, by name."""
    made: dict[str, Case] = {
        "grammar": partial(with_grammar, folder),
        "reports on prompts": partial(with_reports, folder),
        "adapters": partial(with_adapters, folder),
        "adapters, eager": partial(with_adapters, folder, enforce_eager=True),
        "adapters, drafts": partial(with_adapters, folder, speculative_config="ngram"),
        "adapters, reports on prompts": partial(with_adapters, folder, reports=True),
        "modules behind a decoder": lambda: run(make_embedder(folder / "embedder"), texts(), max_model_len=62),
        "prompts that begin inside a page": partial(with_large_pages, folder),
        "kept outputs of a tower": partial(with_kept_outputs, folder),
        "sound": partial(with_sound, folder),
        "KV in the host's memory": partial(with_tiers, folder, "qwen3", kv_host_size=KV_BYTES),
        "KV on disk": partial(with_tiers, folder, "qwen3", kv_disk=str(folder / "kv"), kv_disk_size=KV_BYTES),
        "kept states": partial(with_tiers, folder, "lfm2", kv_host_size=KV_BYTES),
        "windows in the host's memory": partial(with_tiers, folder, "gemma3", kv_host_size=KV_BYTES),
    }
    made |= {f"images, {name}": partial(with_images, folder, name) for name in TOWERS}
    made |= {f"stored {layout}": partial(stored, folder, layout) for layout in (*CASES, "Q8_0", "Q4_0")}
    made["hopper"] = partial(with_large_heads, folder, attention_backend="hopper")
    return made


def with_large_heads(folder: Path, **options: Any) -> dict[str, Any]:
    """Heads that the kernel for Hopper takes."""
    model = make_checkpoint(folder / "large heads", "qwen3", seed=0, head_dim=128)
    return run(model, requests(), page_size=16, **options)


def with_grammar(folder: Path) -> dict[str, Any]:
    """Half of the requests follow a grammar."""
    grammar = Grammar(json.dumps({"grammars": [{"lark_grammar": QUOTES}]}), "structured_outputs")
    wanted = requests()
    for one in wanted[::2]:
        one.params = msgspec.structs.replace(one.params, grammar=grammar)
    return run(make_checkpoint(folder / "qwen3", "qwen3", seed=0), wanted)


def with_reports(folder: Path) -> dict[str, Any]:
    """Half of the requests want the log probabilities of their prompts."""
    wanted = requests()
    for one in wanted[::2]:
        one.params = msgspec.structs.replace(one.params, prompt_logprobs=2)
    return run(make_checkpoint(folder / "qwen3", "qwen3", seed=0), wanted)


def with_large_pages(folder: Path) -> dict[str, Any]:
    """Prompts that have a part of a page in common."""
    wanted = requests()
    for number, one in enumerate(wanted):
        one.prompt_token_ids = [*range(100), number, *one.prompt_token_ids]
    return run(make_checkpoint(folder / "qwen3", "qwen3", seed=0), wanted, page_size=64, num_pages=100)


def with_adapters(folder: Path, *, reports: bool = False, **options: Any) -> dict[str, Any]:
    """Three adapters for two slots; every fourth request wants the base model, and with `reports` all want those."""
    base = make_checkpoint(folder / "qwen3", "qwen3", seed=0)
    folders = [folder / f"adapter{number}" for number in range(len(TARGETS))]
    for number, (own, targets) in enumerate(zip(folders, TARGETS, strict=True)):
        write_adapter(base, own, targets, 1 + 3 * number)

    def adapted(engine: Engine) -> list[AddRequest]:
        wanted, adapters = requests(), engine.extension(AdapterRequests)
        assert adapters is not None
        for number, one in enumerate(wanted):
            if reports:
                one.params = msgspec.structs.replace(one.params, prompt_logprobs=number)
            if number % 4:
                one.adapter = adapters.look_at(f"a{number % 4}", str(folders[number % 4 - 1]))
        return wanted

    return run(base, adapted, **LORA, **options)


def write_adapter(base: Path, folder: Path, targets: tuple[str, ...], rank: int) -> None:
    """Write an adapter of these modules, as peft does."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights, tensors = load_file(base / "model.safetensors"), {}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            is_embedding = module.endswith("embed_tokens")
            inputs, outputs = reversed(weight.shape) if not is_embedding else weight.shape
            kinds = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A.weight", "lora_B.weight")
            for kind, shape in zip(kinds, ((rank, inputs), (outputs, rank)), strict=True):
                tensors[f"base_model.model.{module}.{kind}"] = torch.zeros(shape)
    save_file(tensors, folder / "adapter_model.safetensors")


def with_images(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    """Requests with no, one and several images."""
    model = TOWERS[name](folder / name)
    spec, rng = read_vision(model), np.random.default_rng(0)
    assert spec is not None
    sizes = [[(3, 3)], [], [(2, 2), (1, 4)], [(3, 2)], []]
    wanted = [request_of(spec, rng, number, own) for number, own in enumerate(sizes)]
    return _with_read_tower(model, wanted, **options)


def with_kept_outputs(folder: Path) -> dict[str, Any]:
    """Outputs of one engine are those of the next one."""
    store, read = str(folder / "outputs"), []

    def read_one(outputs: StoredOutputs, one: MediaInput, original: Any = StoredOutputs.load) -> torch.Tensor | None:
        with _disable_current_modes():
            read.append(original(outputs, one))
        return read[-1]

    with patch.object(StoredOutputs, "load", read_one), patch.object(encoder_outputs, "packed_output", _packed):
        with_images(folder, "qwen3 vl", encoder_store=store)
        told = with_images(folder, "qwen3 vl", encoder_store=store)
    assert read and all(one is not None for one in read)
    return told


def _packed(name: str, output: torch.Tensor) -> bytes:
    # On a thread, which fake tensors know nothing of.
    return pack(name, str(output.dtype).removeprefix("torch."), tuple(output.shape), bytes(output.nbytes))


def with_sound(folder: Path) -> dict[str, Any]:
    """Requests with no and one clip."""
    model, rng = make_audio_checkpoint(folder / "sound"), np.random.default_rng(0)
    spec = read_audio(model)
    assert spec is not None
    wanted = requests()
    for one, seconds in zip(wanted[::2], (0.5, 1.3, 2.0), strict=False):
        clip = noise(rng, seconds, RATE)
        span = MediaSpan(1, num_tokens(len(clip)), content_digest(clip.tobytes(), 0, 0, ""), 0, 0, spec.token_id)
        one.media = [MediaInput(span, clip.tobytes())]
        ids = [5, *[spec.token_id] * span.length, *one.prompt_token_ids]
        one.prompt_token_ids = with_surrogates(ids, one.media)
    return _with_read_tower(model, wanted)


def _with_read_tower(model: Path, wanted: list[AddRequest], **options: Any) -> dict[str, Any]:
    # Models with towers refuse dummy weights: theirs are read, those of the decoder are not.
    with patch.object(loader, "_fill", lambda *parts: None):
        return run(model, wanted, load_format="auto", **options)


def with_tiers(folder: Path, family: str, **tiers: Any) -> dict[str, Any]:
    """Few pages, so that what comes again has gone to another memory."""
    model = make_checkpoint(folder / family, family, seed=0)
    return run(model, requests(), num_pages=100, max_model_len=380, **tiers)


def stored(folder: Path, layout: str) -> dict[str, Any]:
    """A checkpoint in the layout of a publisher, or a file of blocks; its weights are read."""
    name = folder / f"stored {layout}"
    if layout in CASES:
        model = make_checkpoint(name, "qwen3", seed=0)
        quantize(model, *CASES[layout], np.random.default_rng(0))
    else:
        made = make_checkpoint(name, "qwen3", seed=0, hidden_size=256, intermediate_size=256, num_attention_heads=8)
        model = fetch(str(write_gguf(made, "qwen3", layout)), None, str(folder / "cache"))
    return run(model, requests(), load_format="auto")
