"""`EagleHead`: draft behind each step of a model with an EAGLE-3 head, which takes the model's hidden states.

The head runs pairs: g of the token at p, made of hidden states that the model has for it, and the token at p + 1. What
it gives for a pair is the token at p + 2; behind known tokens its own hidden state stands in the place of g.

    positions     |     p - 1     |       p       |     p + 1     |
    tokens        |               |       t       |  t' (newest)  |  drafts ...
    g             |      g  ──────┼──────> x <────┼── embedding   |
    KV of a pair  |               |    (g, t)     |    (g, t')    |

A pair's KV lies in the slot of its later token, so what a page holds follows from the tokens up to its own end: whoever
finds a prefix in the cache finds the head's KV for it, whatever comes behind. Slot 0 has no pair, and no token attends
to it. Of the last cached token a hit needs g, too; it is kept for each slot, and goes with its page wherever that goes.

Knows what `DraftModel` knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import IntArray, StepPlan, StepResult
from tokenmill.core.request import Proposal
from tokenmill.engine.speculation.draft_model import DraftingModel, DraftModel, Tables
from tokenmill.engine.speculation.draft_rows import LongArray
from tokenmill.engine.speculation.step_taps import StepTaps
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.protocol import AttentionBackend

if TYPE_CHECKING:
    from tokenmill.platform.arrays import AnyArray


FloatArray = npt.NDArray[np.float32]

# Of all drafts of a row so far: where it is smaller, one more cannot pay.
LEAST_CHANCE = 0.1


class HeadModel(DraftingModel, Protocol):
    """The part of a draft head's decoder that drafts need."""

    def logits(self, outputs: Any) -> AnyArray:
        """Return the logits of final hidden states, [S, D] float32."""

    def fuse(self, taps: AnyArray) -> AnyArray:
        """Return g of tokens: [T, taps, size], which may be overwritten, -> [T, hidden_size]."""


class HeadParts(NamedTuple):
    """Parts of a head besides its decoder.

    Attributes:
        taps: hidden states of each step of the model.
        memory: [slots, hidden_size] for g, of the pages that both share.
        token_ids: [D], the token of the model that each of the head's stands for; None: the same.
        recycles_normed: see `DraftHeadSpec`.
    """

    taps: StepTaps
    memory: npt.NDArray[Any]
    token_ids: npt.NDArray[np.int64] | None
    recycles_normed: bool


class EagleHead(DraftModel):
    """Greedy drafts of a head, all rows in one pass a token. Rows rest as those of a draft model do."""

    first_position = 1

    def __init__(
        self,
        model: HeadModel,
        attention: AttentionBackend,
        tables: Tables,
        num_tokens: int,
        max_len: int,
        parts: HeadParts,
    ) -> None:
        """Take what a `DraftModel` takes, and the parts of a head."""
        super().__init__(model, attention, tables, num_tokens, max_len)
        self._head = model
        self._taps, self._memory, self._token_ids, self._recycles_normed = parts
        # In the place of g, for the next pass: of the rows of the one before.
        self._recycled = self._memory[:0]
        # That the drafts of each pass are right: of its rows.
        self._chances: list[FloatArray] = []

    def propose(self, plan: StepPlan, result: StepResult) -> dict[int, Proposal]:
        """Keep g of the tokens that the step has run; then see `DraftModel.propose`."""
        slots, taps = self._taps.take(plan)
        self._memory[slots] = self._head.fuse(taps)
        return super().propose(plan, result)

    def _forward_known(self, batch: ForwardBatch, slots_before: LongArray) -> Any:
        self._chances = []
        return self._forward(batch, self._memory[slots_before])

    def _forward_drafts(self, batch: ForwardBatch) -> Any:
        return self._forward(batch, self._recycled[: len(batch.token_ids)])

    def _forward(self, batch: ForwardBatch, hidden: npt.NDArray[Any]) -> Any:
        """Run pairs, and keep what stands in the place of g for the next draft."""
        count, size = len(batch.output_indices), self._memory.shape[1]
        behind = np.empty((count, 1, size), self._memory.dtype)
        outputs = self._model.forward(msgspec.structs.replace(batch, taps=behind), self._attention, hidden)
        self._recycled = outputs if self._recycles_normed else behind[:, 0]
        return outputs

    def _best(self, outputs: Any) -> LongArray:
        logits = np.asarray(self._head.logits(outputs))
        ids = logits.argmax(axis=1)
        largest = np.take_along_axis(logits, ids[:, None], axis=1)
        with np.errstate(invalid="ignore"):
            self._chances.append(1 / np.exp(logits - largest).sum(axis=1))
        own = ids if self._token_ids is None else self._token_ids[ids]
        return np.where(np.isfinite(largest[:, 0]), own, -1)

    def _goes_on(self, count: int) -> bool:
        chances = np.prod([chances[:count] for chances in self._chances], axis=0)
        return bool((chances >= LEAST_CHANCE).any())

    def _proposal(self, place: int, token_ids: IntArray) -> Proposal:
        chances = [chances[place] for chances in self._chances[: len(token_ids)]]
        return Proposal(token_ids, is_forced=False, probabilities=np.array(chances, dtype=np.float32))
