"""Nothing is computed twice: what an engine can serve by what may happen to it.

Each cell is a conversation that goes on in the next engine: at least 95% of it is found, and the bits of the answer are
those of an engine to which nothing happened. docs/kv-transfer.md has the table, with the cells that are blank and why.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.checkpoints import make_checkpoint
from tests.eventually import eventually
from tests.model.adapters.trained import make_adapter
from tests.model.kernels.native import ISAS
from tests.seeding import seed_for
from tests.tiers import some
from tokenmill import LLM, LoRARequest, SamplingParams
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.version import VERSION, versions

SEED = seed_for(__name__)
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=1)
FOUND = 0.95
ENGINE = {"num_pages": 240, "max_model_len": 2048, "max_num_seqs": 4, "dtype": "bfloat16"}
WINDOW = {"use_sliding_window": True, "sliding_window": 48, "max_window_layers": 1}
DRAFT_MODEL = "a model of the same vocabulary"
ADAPTERS = {"enable_lora": True}
# What an engine can serve: family and shape of the checkpoint, flags.
SERVED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full attention": ("qwen3", {}, {}),
    "windows": ("qwen3", WINDOW, {}),
    "recurrent states": ("lfm2", {}, {}),
    "int8 KV": ("qwen3", {}, {"kv_cache_dtype": "int8"}),
    "int8-int4 KV": ("qwen3", {}, {"kv_cache_dtype": "int8-int4"}),
    "int4 KV": ("qwen3", {}, {"kv_cache_dtype": "int4"}),
    "int4 KV and windows": ("qwen3", WINDOW, {"kv_cache_dtype": "int4"}),
    "int4 KV page-first": ("qwen3", {}, {"kv_cache_dtype": "int4", "kv_layout": "page-first"}),
    "int4 KV and states": ("qwen3_5", {}, {"kv_cache_dtype": "int4"}),
    "drafts": ("qwen3", {}, {"speculative_config": "suffix"}),
    "draft models": ("qwen3", {}, {"speculative_config": DRAFT_MODEL}),
    "adapters": ("qwen3", {}, ADAPTERS),
    "ranks": ("qwen3", {}, {"tensor_parallel_size": 2}),
    "stages": ("qwen3", {}, {"pipeline_parallel_size": 2}),
    "ranks and int4 KV": ("qwen3", {}, {"tensor_parallel_size": 2, "kv_cache_dtype": "int4"}),
}
Answer = tuple[list[int], list[dict[int, float]]]


class Talk:
    """A conversation of two turns, and the answers of an engine to which nothing happened."""

    def __init__(self, folder: Path, flags: dict[str, Any]) -> None:
        generator = random.Random(SEED)
        self.folder, self.flags = folder, flags
        self.adapter: LoRARequest | None = None
        if flags == ADAPTERS:
            make_adapter(folder, folder.with_name("adapter"), SEED % 1000)
            self.adapter = LoRARequest("adapter", 1, str(folder.with_name("adapter")))
        # A text leaves a recurrent state every 64 tokens: less than 95% of a shorter one could be found.
        self.first = [generator.randrange(3, 250) for _ in range(generator.randint(1300, 1400))]
        (tokens, _), _ = self.say(self.first)
        self.second = [*self.first, *tokens, *(generator.randrange(3, 250) for _ in range(9))]
        self.reply, _ = self.say(self.second)

    def open(self, disk: Path | None = None) -> LLM:
        tier = {} if disk is None else {"kv_disk": str(disk), "kv_disk_size": 64 << 20}
        return LLM(self.folder, **{**ENGINE, **self.flags, **tier})

    def say(self, prompt: list[int], disk: Path | None = None) -> tuple[Answer, int]:
        """Return the answer of an engine of its own, and how many tokens of the prompt were cached."""
        with self.open(disk) as llm:
            return self.ask(llm, prompt)

    def ask(self, llm: LLM, prompt: list[int]) -> tuple[Answer, int]:
        (output,) = llm.generate([prompt], PARAMS, use_tqdm=False, lora_request=self.adapter)
        answer = output.outputs[0]
        ranked = [{token: one.logprob for token, one in place.items()} for place in answer.logprobs or []]
        return (list(answer.token_ids), ranked), output.num_cached_tokens

    def stored(self, llm: LLM) -> None:
        """Wait until the disk has all full pages of the first turn."""
        least = (len(self.first) - 1) // 16 * 16
        eventually(lambda: llm.step() is not None and llm.stats().num_stored_tokens >= least)


@contextmanager
def restart(talk: Talk, disk: Path) -> Iterator[Path]:
    """The engine ends, another one begins."""
    talk.say(talk.first, disk)
    yield disk


@contextmanager
def kill(talk: Talk, disk: Path) -> Iterator[Path]:
    """The files as they are while the engine still runs, as kill -9 leaves them."""
    with talk.open(disk) as llm:
        talk.ask(llm, talk.first)
        talk.stored(llm)
        left = Path(shutil.copytree(disk, disk.with_name("left")))
    yield left


@contextmanager
def beside(talk: Talk, disk: Path) -> Iterator[Path]:
    """The engine runs on while another one begins."""
    with talk.open(disk) as llm:
        talk.ask(llm, talk.first)
        talk.stored(llm)
        yield disk


@contextmanager
def swap(talk: Talk, disk: Path) -> Iterator[Path]:
    """Another model has its turn, with the same tokens, over the same folder."""
    talk.say(talk.first, disk)
    other = make_checkpoint(disk.with_name("other"), "llama", seed=SEED % 1000, max_position_embeddings=2048)
    with LLM(other, **ENGINE, kv_disk=str(disk), kv_disk_size=64 << 20) as llm:
        (output,) = llm.generate([talk.first], PARAMS, use_tqdm=False)
        assert output.num_cached_tokens == 0, "KV of another model"
    yield disk


@contextmanager
def upgrade(talk: Talk, disk: Path) -> Iterator[Path]:
    """Another release stores, wherever its name is read: then this one comes."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("tokenmill.") and getattr(module, "VERSION", None) == VERSION:
                stack.enter_context(patch.object(module, "VERSION", "0.0.9"))
        assert versions()["tokenmill"] == "0.0.9"
        talk.say(talk.first, disk)
    yield disk


EVENTS = {"restart": restart, "kill": kill, "swap": swap, "beside": beside, "upgrade": upgrade}
CELLS = [(served, event) for served in SERVED for event in EVENTS]


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Talk]:
    made: dict[str, Talk] = {}

    def find(name: str) -> Talk:
        if name not in made:
            family, shape, flags = SERVED[name]
            size = {"max_position_embeddings": 2048, **shape}
            folder = make_checkpoint(tmp_path_factory.mktemp("model"), family, seed=SEED % 2**31, **size)
            if DRAFT_MODEL in flags.values():
                draft = make_checkpoint(tmp_path_factory.mktemp("draft"), family, seed=SEED % 2**31 + 1, **size)
                chosen = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
                flags = {"speculative_config": json.dumps(chosen)}
            made[name] = Talk(folder, flags)
        return made[name]

    return find


@pytest.mark.skipif(not ISAS, reason="the native kernels are not built here")
@pytest.mark.parametrize(("served", "event"), some(CELLS, 4))
def test_a_conversation_goes_on(talks: Callable[[str], Talk], served: str, event: str, tmp_path: Path) -> None:
    talk = talks(served)
    with EVENTS[event](talk, tmp_path / "kv") as disk:
        reply, num_cached = talk.say(talk.second, disk)
    assert reply == talk.reply, f"seed {SEED}"
    assert num_cached >= FOUND * (len(talk.second) - 10), "the turns that were there before"


def test_other_numbers_find_nothing(
    talks: Callable[[str], Talk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release that rounds in another way, so has another `NUMERICS`, takes nothing of it, and answers right."""
    talk = talks("int4 KV")
    talk.say(talk.first, tmp_path)
    assert talk.say(talk.second, tmp_path)[1] > 0
    monkeypatch.setattr("tokenmill.model.weights.fingerprint.NUMERICS", -1)
    assert talk.say(talk.second, tmp_path) == (talk.reply, 0)


@pytest.mark.parametrize("flag", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("source", [{"kv_source": ("some:Store",)}, {"kv_host_size": 1 << 20}])
def test_ranks_and_stages_refuse_other_sources(flag: str, source: dict[str, Any], tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", seed=1)
    with pytest.raises(InvalidConfig, match="need an engine of one rank"):
        LLM(folder, **ENGINE, **{flag: 2}, **source)
