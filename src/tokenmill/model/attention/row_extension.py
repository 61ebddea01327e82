"""`RowExtension`: a capability's part in the rows of running requests and in the batches that are made of them.

    plan ─> enter, split ─> arrays are sent ─> apply ─> extend the batch ─> forward, sample with `head_of` each row
    its outcome is there: ended
    in eager steps on a device: add_logits in the place of `head_of`, which reports on prompts ask
    decodes in graphs: extend_decodes, add_logits, once for all replays; `has_any` chooses the graphs, `fits_graph` if
                      there is one; decoded behind each replay

Hooks do nothing unless a subclass overrides them. Plans name rows by number; whatever a row means is kept here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tokenmill.core.plan import StepPlan, StepResult
from tokenmill.model.attention.batch import ForwardBatch

if TYPE_CHECKING:
    from tokenmill.model.kernels.adapter_parts import HeadAddition
    from tokenmill.platform.arrays import Array

Arrays = dict[str, npt.NDArray[Any]]
"""The host's arrays for a step, by name."""
Sent = Mapping[str, "Array"]
"""The same arrays on the device; see `ArrayLibrary`."""


AddLogits: TypeAlias = "Callable[[Array, Array, Array, npt.NDArray[np.integer] | None], None]"
"""Adds to logits; the arguments are those of `RowExtension.add_logits`."""


class RowExtension:
    """State of rows beside their tokens and pages."""

    def enter(self, plan: StepPlan) -> Arrays:
        """Take in the new rows of a plan; return arrays to be sent to the device for `apply` and `extend`."""
        return {}

    def split(self, plan: StepPlan, query_starts: npt.NDArray[np.int32], first: int) -> Arrays:
        """Return further arrays to be sent, once it is known which requests of the plan run in a graph.

        Args:
            query_starts: [B + 1], where the tokens of each request begin.
            first: the requests before this one run in a graph.
        """
        return {}

    def apply(self, plan: StepPlan, sent: Sent) -> None:
        """Update the device before the step."""

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Return the batch of a step with the inputs that this capability adds.

        Args:
            first: the requests of the plan before this one are not in the batch.
            arrays, sent: of the whole step, the arrays of `enter` among them.
        """
        return batch

    def head_of(self, row: int) -> HeadAddition | None:
        """Return the addition to the model's head for a row; None: nothing is added."""
        return None

    def add_logits(self, outputs: Array, logits: Array, rows: Array, known: npt.NDArray[np.integer] | None) -> None:
        """Add to logits [S, vocab_size] of outputs [S, hidden_size] on a device, where all rows are sampled together.

        Args:
            rows: [S] int64, on the device. known: the same on the host; None: a graph is captured, for any rows.
        """

    def has_any(self, rows: npt.NDArray[np.integer]) -> bool:
        """Return True if decodes of these rows need graphs with `extend_decodes`; others then run in graphs without."""
        return False

    def fits_graph(self, num_samples: npt.NDArray[np.integer]) -> bool:
        """Return False if decodes with these numbers of samples, drafts among them, must not run in a graph."""
        return True

    def extend_decodes(self, batch: ForwardBatch, rows: Array) -> ForwardBatch:
        """Return a batch of decodes with the inputs that this capability adds.

        Args:
            rows: [T] int64, of its tokens; read on the device only.
        """
        return batch

    def decoded(self, sent: Sent) -> None:
        """Update the device behind the decodes of a graph."""

    def ended(self, plan: StepPlan, result: StepResult) -> None:
        """Take in the outcome of a step, in the order of the steps; a later one may have begun, without its drafts."""

    def close(self) -> None:
        """Release everything: no further step comes."""
