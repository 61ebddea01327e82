"""The features of an engine on the device: clients are told there what the CPU's reference tells them."""

from __future__ import annotations

import importlib.util
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tools.gpu.engines import running

from tokenmill.core.messages import AddRequest
from tokenmill.core.sampling_params import Grammar, SamplingParams
from tokenmill.engine.loop.engine import Engine

if TYPE_CHECKING:
    from tests.engine.runner.told import Told

LIMITS: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256, "page_size": 16}
LIMITS |= {"num_pages": 200, "dtype": "float32", "num_threads": 1}
RECURRENT = "recurrent-"
# Each check, and the package without which it is left out; those for checkpoints are needed by all.
FEATURES = {
    "sampling": "numpy",
    "grammar": "llguidance",
    "drafts": "numpy",
    "draft-model": "numpy",
    "lora": "peft",
    "images": "numpy",
    "images-of-experts": "numpy",
    "kv-host": "numpy",
    "shared-splits": "numpy",
    f"{RECURRENT}lfm2": "numpy",
    f"{RECURRENT}qwen3_5": "numpy",
    f"{RECURRENT}qwen3_next": "numpy",
    f"{RECURRENT}lfm2_moe": "numpy",
    f"{RECURRENT}granite_hybrid": "numpy",
}
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "even": {"type": "boolean"},
        "size": {"enum": [1, 22]},
    },
    "required": ["colour", "even", "size"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
# Tokens of the prompt that all requests have in common: three splits of decodes, and a part of the fourth.
COMMON = 900
HOST_BYTES = 8 << 20


def feature_names() -> list[str]:
    """The checks that can run with what is installed."""
    if importlib.util.find_spec("transformers") is None:
        return []
    return [name for name, package in FEATURES.items() if importlib.util.find_spec(package) is not None]


class FeatureChecks:
    """The checks, by name; each raises AssertionError with what differed.

    Args:
        seed: of prompts, weights and adapters; the report tells it.
    """

    def __init__(self, platform: Any, folder: Path, seed: int) -> None:
        self._platform = platform
        self._folder = folder
        self._seed = seed
        self._rng = random.Random(seed)
        self._is_dry = platform.name != "cuda"
        self._length = 4 if self._is_dry else 16
        self._limits = {**LIMITS, "max_num_seqs": 3, "num_pages": 60} if self._is_dry else LIMITS

    def work_of(self, name: str) -> Callable[[], None]:
        """Return the work of one of `feature_names`."""
        if name.startswith(RECURRENT):
            return partial(self._recurrent, name.removeprefix(RECURRENT))
        work: Callable[[], None] = getattr(self, f"_{name.replace('-', '_')}")
        return work

    def _checkpoint(self, family: str = "qwen3", **shape: Any) -> Path:
        from tests.checkpoints import make_checkpoint

        return make_checkpoint(self._folder / family, family, seed=self._seed, **shape)

    def _requests(self, kinds: list[dict[str, Any]], length: int = 0) -> list[AddRequest]:
        from tests.engine.runner.test_drafts import requests

        return requests(self._rng, kinds[:3] if self._is_dry else kinds, length or self._length)

    def _compare(self, model: Path, tell: Callable[[Engine], list[Told]], **options: Any) -> list[Told]:
        """Compare what the CPU's reference and the device tell; returns the latter."""
        from tests.engine.runner.told import assert_same

        found = []
        for platform in (None, self._platform):
            with running(model, platform, **{**self._limits, **options}) as engine:
                found.append(tell(engine))
        assert_same(*found, is_exact=False)
        return found[1]

    def _sampling(self) -> None:
        from tests.engine.runner.test_drafts import KINDS

        kinds = [KINDS[2], KINDS[4], KINDS[7]] if self._is_dry else KINDS[:10]
        wanted = self._requests(kinds)
        self._compare(self._checkpoint(), lambda engine: _told(engine, wanted))

    def _grammar(self) -> None:
        import tokenizers

        schema = {"enum": [True, False]} if self._is_dry else SCHEMA
        grammar = Grammar(json.dumps({"grammars": [{"json_schema": schema}]}), "structured_outputs")
        kinds: list[dict[str, Any]] = [
            {"temperature": 0.0},
            {"temperature": 1.0, "presence_penalty": 0.5, "logit_bias": {70: 2.0}, "logprobs": 1},
            {"temperature": 1.0, "top_k": 50},
            {"temperature": 1.0},
        ]
        wanted = self._requests([{**kind, "grammar": grammar, "max_tokens": 100} for kind in kinds])
        model = self._checkpoint()
        tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
        for (tokens, *_), _ in self._compare(model, lambda engine: _told(engine, wanted)):
            text = tokenizer.decode(tokens)
            answer = json.loads(text)
            assert self._is_dry or list(answer) == SCHEMA["required"], text

    def _drafts(self) -> None:
        from tests.engine.runner.test_drafts import KINDS, check

        options: dict[str, Any] = {} if self._is_dry else {"speculative_config": _SUFFIX}
        wanted = self._requests([KINDS[1], KINDS[4], KINDS[0], KINDS[2]])
        with running(self._checkpoint(), self._platform, **{**self._limits, **options}) as engine, _replays() as widths:
            _, drafted = check(engine, wanted, self._rng, is_exact=False, lengths=(1, 4))
        assert max(drafted) > 1, "no draft was right"
        assert self._is_dry or max(widths) > 1, "no graph took drafts"

    def _draft_model(self) -> None:
        import torch
        from tests.engine.runner.test_draft_model import Holding
        from tests.engine.runner.test_drafts import KINDS
        from tests.engine.runner.told import assert_same

        # Its own model, so that what it drafts for greedy requests is right.
        model = self._checkpoint()
        chosen = json.dumps({"method": "draft_model", "model": str(model), "num_speculative_tokens": 3})
        greedy, drawn = self._requests([KINDS[0]] * 6), self._requests([KINDS[1], KINDS[4], KINDS[2], KINDS[7]])
        with running(model, None, **self._limits) as engine:
            want = [_told(engine, wanted) for wanted in (greedy, drawn)]
        options = {**self._limits, "async_scheduling": not self._is_dry, "speculative_config": chosen}
        with running(model, self._platform, **options) as engine:
            engine.scheduler.state.drafters = (ours := Holding(),)
            for wanted, told in zip((greedy, drawn), want, strict=True):
                assert_same(told, _told(engine, wanted), is_exact=False)
                if wanted is greedy:
                    assert ours.acceptance > 0.9, f"only {ours.acceptance:.0%} of its own drafts are right"
            if not self._is_dry:
                torch.cuda.set_sync_debug_mode("error")
                try:
                    _told(engine, greedy)  # the host waits for nothing but results
                finally:
                    torch.cuda.set_sync_debug_mode("default")

    def _lora(self) -> None:
        from tests.engine.runner.test_drafts import KINDS
        from tests.model.adapters.test_on_device import make_adapters, tell

        base = self._checkpoint(attention_bias=True)
        folders = make_adapters(base, self._folder, self._seed)
        wanted = self._requests([KINDS[0], KINDS[1], KINDS[4], KINDS[3]])

        def tell_twice(engine: Engine) -> list[Told]:
            return [*tell(engine, wanted, folders), *tell(engine, wanted[-1:], folders)]  # and the base model alone

        # Two slots for three adapters: one is filled anew while others run.
        with _replays() as widths:
            self._compare(base, tell_twice, enable_lora=True, max_loras=2, max_lora_rank=8)
        assert widths, "nothing ran in graphs"

    def _images_of_experts(self) -> None:
        self._images(has_experts=True)

    def _images(self, *, has_experts: bool = False) -> None:
        import numpy as np
        from tests.model.vision.test_on_device import request
        from tests.vision_checkpoints import make_vision_checkpoint

        from tokenmill.model.vision.spec_reader import read_vision

        model = make_vision_checkpoint(self._folder / "vision", self._seed, has_experts=has_experts)
        spec, rng = read_vision(model), np.random.default_rng(self._seed)
        assert spec is not None, "a checkpoint with a tower"
        sizes = [[(2, 2)], []] if self._is_dry else [[(3, 3)], [], [(2, 2), (1, 4)], [(3, 2)], []]
        wanted = [request(spec, rng, number, own) for number, own in enumerate(sizes)]
        # Once more from the caches.
        self._compare(model, lambda engine: [*_told(engine, wanted), *_told(engine, wanted[:1])], max_model_len=128)

    def _kv_host(self) -> None:
        small = {"page_size": 4, "num_pages": 40, "max_num_seqs": 2, "max_model_len": 64, "kv_host_size": HOST_BYTES}
        first, others = self._long(2), self._long(6)
        with running(self._checkpoint(), self._platform, **{**self._limits, **small}) as engine:
            want = _told(engine, first)
            for _ in range(3):  # what is being stored may be pushed out before it is
                _told(engine, others)
                assert _told(engine, first) == want, "other tokens by the pages that came back"
                if engine.stats().num_loaded_tokens:
                    return
        raise AssertionError("nothing came back from the host's memory")

    def _long(self, count: int) -> list[AddRequest]:
        params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.0)
        prompts = [[self._rng.randrange(250) for _ in range(45)] for _ in range(count)]
        return [AddRequest(id=str(number), prompt_token_ids=ids, params=params) for number, ids in enumerate(prompts)]

    def _shared_splits(self) -> None:
        from tests.engine.runner.told import assert_same

        common = [self._rng.randrange(250) for _ in range(300 if self._is_dry else COMMON)]
        model, wanted = self._checkpoint(num_hidden_layers=1, max_position_embeddings=1024), []
        for number in range(2 if self._is_dry else 8):
            params = SamplingParams(max_tokens=self._length, ignore_eos=True, temperature=0.0, logprobs=1)
            wanted.append(AddRequest(id=str(number), prompt_token_ids=[*common, number], params=params))
        sizes = {"max_model_len": 1024, "max_num_batched_tokens": 256}

        def tell(engine: Engine) -> list[Told]:
            return [*_told(engine, wanted[:1]), *_told(engine, wanted)]  # the first brings the pages for all

        shared = self._compare(model, tell, **sizes)
        with running(model, self._platform, **{**self._limits, **sizes}, shared_splits=False) as engine:
            assert_same(tell(engine), shared, is_exact=not self._is_dry)

    def _recurrent(self, family: str) -> None:
        wanted = self._requests([{"temperature": 0.0, "logprobs": 1}] * 6)

        def tell(engine: Engine) -> list[Told]:
            return [*_told(engine, wanted), *_told(engine, wanted[:2])]  # from states kept of prefixes

        with _replays() as widths:
            self._compare(self._checkpoint(family), tell, async_scheduling=True)
        assert widths, "nothing ran in graphs"


_SUFFIX = json.dumps({"method": "suffix", "num_speculative_tokens": 4})


def _told(engine: Engine, wanted: list[AddRequest]) -> list[Told]:
    from tests.engine.runner.test_not_numbers import run
    from tests.engine.runner.told import told

    outputs = run(engine, wanted)
    return [told(outputs[request.id]) for request in wanted]


@contextmanager
def _replays() -> Iterator[Counter[int]]:
    """Count the replays of graphs, by how many tokens a request has in them."""
    from tokenmill.engine.runner.cuda_graphs import DecodeGraphs

    widths, original = Counter[int](), DecodeGraphs.run

    def run(graphs: DecodeGraphs, inputs: Any, starts: Any = None) -> Any:
        widths[1 if starts is None else len(inputs) // (len(starts) - 1)] += 1
        return original(graphs, inputs, starts)

    with patch.object(DecodeGraphs, "run", run):
        yield widths
