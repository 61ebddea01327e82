"""Conversations of two turns for every kind of model and flags whose KV is kept: what is said, and the answers."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.checkpoints import make_checkpoint
from tests.engine.runner.told import Told, told
from tests.eventually import eventually
from tests.model.adapters.trained import make_adapter
from tests.seeding import seed_for
from tests.vision_checkpoints import make_vision_checkpoint
from tokenmill import SamplingParams
from tokenmill.config.configs import EngineConfig
from tokenmill.core.media import MediaInput, MediaSpan, content_digest, with_surrogates
from tokenmill.core.messages import AddRequest, TokenOutput
from tokenmill.engine.loop.engine import Engine
from tokenmill.model.adapters.requests import AdapterRequests
from tokenmill.model.vision.spec_reader import read_vision
from tokenmill.startup.assembly.setup import build_engine

SEED = seed_for(__name__)
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=1)
# A quarter of the pages holds a conversation: where the disk is slow, no more are offered to it at a time.
ENGINE = {"num_pages": 400, "max_model_len": 2048, "max_num_seqs": 4, "dtype": "bfloat16"}
DISK_BYTES = 64 << 20
WINDOW = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}
DRAFT_MODEL = "a model of the same vocabulary"
ADAPTERS = {"enable_lora": True}
IMAGES, IMAGE_SIDE = "qwen3_vl", 96
# Two engines of one server; each that opens is another one than that before.
REPLICAS = {"replica": (0, 2)}
# What an engine can serve: family and shape of the checkpoint, flags.
SERVED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full attention": ("qwen3", {}, {}),
    "windows": ("qwen3", WINDOW, {}),
    "Gemma 3": ("gemma3", {"sliding_window": 48}, {}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 48}, {}),
    "recurrent states": ("lfm2", {}, {}),
    "Qwen3.5's states": ("qwen3_5", {}, {}),
    "Qwen3-Next's states": ("qwen3_next", {}, {}),
    "Granite 4's states": ("granite_hybrid", {}, {}),
    "int8 KV": ("qwen3", {}, {"kv_cache_dtype": "int8"}),
    "int8-int4 KV": ("qwen3", {}, {"kv_cache_dtype": "int8-int4"}),
    "int4 KV": ("qwen3", {}, {"kv_cache_dtype": "int4"}),
    "int4 KV and windows": ("qwen3", WINDOW, {"kv_cache_dtype": "int4"}),
    "int4 KV page-first": ("qwen3", {}, {"kv_cache_dtype": "int4", "kv_layout": "page-first"}),
    "int4 KV and states": ("qwen3_5", {}, {"kv_cache_dtype": "int4"}),
    "drafts": ("qwen3", {}, {"speculative_config": "suffix"}),
    "draft models": ("qwen3", {}, {"speculative_config": DRAFT_MODEL}),
    "adapters": ("qwen3", {}, ADAPTERS),
    "images": (IMAGES, {}, {}),
    "replicas": ("qwen3", {}, REPLICAS),
    "ranks": ("qwen3", {}, {"tensor_parallel_size": 2}),
    "stages": ("qwen3", {}, {"pipeline_parallel_size": 2}),
    "ranks and int4 KV": ("qwen3", {}, {"tensor_parallel_size": 2, "kv_cache_dtype": "int4"}),
}
WINDOWED = ("windows", "Gemma 3", "gpt-oss", "int4 KV and windows")
STATES = tuple(name for name in SERVED if "states" in name)


class Talk:
    """A conversation of two turns, and the answers of an engine to which nothing happened."""

    def __init__(self, folder: Path, flags: dict[str, Any]) -> None:
        generator = random.Random(SEED)
        self.folder, self.flags = folder, flags
        self.media: list[MediaInput] = []
        self.num_opened = 0
        if flags == ADAPTERS:
            make_adapter(folder, folder.with_name("adapter"), SEED % 1000)
        # A text leaves a recurrent state every 64 tokens: less than 95% of a shorter one could be found.
        words = [generator.randrange(3, 250) for _ in range(generator.randint(1300, 1400))]
        self.first = self._with_image(words, generator.randrange(1300)) if read_vision(folder) else words
        (reply, _), _ = self.say(self.first)
        self.second = [*self.first, *reply[0], *(generator.randrange(3, 250) for _ in range(9))]
        self.reply, _ = self.say(self.second)

    def _with_image(self, words: list[int], place: int) -> list[int]:
        spec = read_vision(self.folder)
        assert spec is not None
        pixels = np.random.default_rng(SEED).integers(0, 256, (1, IMAGE_SIDE, IMAGE_SIDE, 3), dtype=np.uint8).tobytes()
        rows = IMAGE_SIDE // spec.patch_size
        length = (rows // spec.merge) ** 2
        digest = content_digest(pixels, IMAGE_SIDE, IMAGE_SIDE, "")
        self.media = [MediaInput(MediaSpan(place + 1, length, digest, rows, rows, spec.image_token_id), pixels)]
        image = [spec.start_token_id, *[spec.image_token_id] * length, spec.end_token_id]
        return with_surrogates([*words[:place], *image, *words[place:]], self.media)

    @property
    def replica(self) -> int:
        """The number of the engine that was opened last."""
        return self.num_opened % 2 if self.flags == REPLICAS else 0

    @contextmanager
    def open(self, disk: Path | None = None, **more: Any) -> Iterator[Engine]:
        tier = {} if disk is None else {"kv_disk": str(disk), "kv_disk_size": DISK_BYTES}
        self.num_opened += 1
        own = {"replica": (self.replica, 2)} if self.flags == REPLICAS else {}
        config = EngineConfig(model=str(self.folder), **{**ENGINE, **self.flags, **tier, **more, **own})
        engine = build_engine(config.resolve()).engine
        try:
            yield engine
        finally:
            engine.close()

    def say(self, prompt: list[int], disk: Path | None = None, **more: Any) -> tuple[Told, int]:
        """Return the answer of an engine of its own, and how many tokens of the prompt were cached."""
        params = more.pop("params", None)
        with self.open(disk, **more) as engine:
            return self.ask(engine, prompt, params)

    def ask(self, engine: Engine, prompt: list[int], params: dict[str, Any] | None = None) -> tuple[Told, int]:
        """`params`: the request's for the sources of KV."""
        outputs = self.outputs(engine, prompt, params)
        return told(outputs), max(output.num_cached_tokens for output in outputs)

    def outputs(self, engine: Engine, prompt: list[int], params: dict[str, Any] | None) -> list[TokenOutput]:
        message = AddRequest(
            id=uuid.uuid4().hex, prompt_token_ids=prompt, params=PARAMS, media=self.media, kv_transfer_params=params
        )
        if self.flags == ADAPTERS:
            adapters = engine.extension(AdapterRequests)
            assert adapters is not None
            message.adapter = adapters.look_at("adapter", str(self.folder.with_name("adapter")))
        outputs = engine.add(message)
        while not outputs or outputs[-1].finish_reason is None:
            outputs += [output for output in engine.step() if output.id == message.id]
        assert outputs[-1].error is None, outputs[-1].error
        return outputs

    def stored(self, engine: Engine) -> None:
        """Wait until the disk has all full pages of the first turn."""
        least = (len(self.first) - 1) // 16 * 16
        eventually(lambda: engine.step() is not None and engine.stats().num_stored_tokens >= least)


def make_talk(name: str, make_folder: Callable[[str], Path]) -> Talk:
    """Make the conversation with what is served by this name; `make_folder` makes a new folder."""
    family, shape, flags = SERVED[name]
    size = {"max_position_embeddings": 2048, **shape}
    if family == IMAGES:
        return Talk(make_vision_checkpoint(make_folder("model"), SEED % 2**31, torch.bfloat16, **size), flags)
    make = partial(make_checkpoint, family=family, **size)
    folder = make(make_folder("model"), seed=SEED % 2**31)
    if DRAFT_MODEL in flags.values():
        draft = make(make_folder("draft"), seed=SEED % 2**31 + 1)
        chosen = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
        flags = {"speculative_config": json.dumps(chosen)}
    return Talk(folder, flags)
