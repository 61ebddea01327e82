"""Recurrent states behind stored prefixes: a conversation goes on in the next engine where it ended in this one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.eventually import eventually
from tests.seeding import seed_for
from tests.tiers import some
from tokenmill import LLM, SamplingParams
from tokenmill.engine.scheduler.resources.state_slots import TAIL_SPACING

SEED = seed_for(__name__)
FAMILIES = ("lfm2", "qwen3_5", "qwen3_next", "granite_hybrid", "lfm2_moe")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


class Talk:
    """A conversation of two turns, and the answers of an engine that was never disturbed."""

    def __init__(self, folder: Path) -> None:
        generator = random.Random(SEED)
        self.folder = folder
        self.first = [generator.randrange(3, 250) for _ in range(generator.randint(80, 300))]
        self.answer, _ = self.say(self.first)
        self.second = [*self.first, *self.answer, *(generator.randrange(3, 250) for _ in range(9))]
        self.reply, _ = self.say(self.second)
        known = len(self.first) + len(self.answer) - 1
        # A text that goes on leaves a state now and then, a prompt one at its last full page.
        self.num_known = max(known // TAIL_SPACING * TAIL_SPACING, (len(self.first) - 1) // 16 * 16)

    def say(self, prompt: list[int], disk: Path | None = None, copy: Path | None = None) -> tuple[list[int], int]:
        """Return the answer of an engine of its own, and how many tokens of the prompt were cached.

        Args:
            copy: gets what the disk holds while the engine still runs, as a kill would leave it.
        """
        tier = {} if disk is None else {"kv_disk": str(disk), "kv_disk_size": 64 << 20}
        with LLM(self.folder, num_pages=120, max_model_len=512, max_num_seqs=4, **tier) as llm:  # type: ignore[arg-type]
            (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            if disk is not None and copy is not None:
                least = (len(prompt) - 1) // 16 * 16
                eventually(lambda: llm.step() is not None and llm.stats().num_stored_tokens >= least)
                shutil.copytree(disk, copy)
        return list(output.outputs[0].token_ids), output.num_cached_tokens


@pytest.fixture(scope="module", params=some(FAMILIES, 2))
def conversation(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talk:
    return Talk(make_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=SEED % 2**31))


def test_a_conversation_goes_on_after_a_restart(conversation: Talk, tmp_path: Path) -> None:
    assert conversation.say(conversation.first, tmp_path) == (conversation.answer, 0)
    assert conversation.say(conversation.second, tmp_path) == (conversation.reply, conversation.num_known)


def test_a_conversation_goes_on_after_a_kill(conversation: Talk, tmp_path: Path) -> None:
    conversation.say(conversation.first, tmp_path / "kv", tmp_path / "left")
    assert conversation.say(conversation.second, tmp_path / "left") == (conversation.reply, conversation.num_known)


def test_a_damaged_state_is_computed_again(conversation: Talk, tmp_path: Path) -> None:
    conversation.say(conversation.first, tmp_path)
    (states,) = tmp_path.glob("kv-*-states-0.pages")
    states.write_bytes(bytes(byte ^ 1 for byte in states.read_bytes()))
    assert conversation.say(conversation.second, tmp_path) == (conversation.reply, 0)
