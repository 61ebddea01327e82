"""`RowState`: keep all state of the rows of running requests. A plan names rows; their contents are here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenmill.core.hooks import hooks
from tokenmill.core.plan import StepPlan
from tokenmill.engine.runner.prompt_reports import PromptReports
from tokenmill.engine.runner.row_tables import RowTables, table_arrays
from tokenmill.engine.runner.samples import Samples
from tokenmill.model.attention.batch import ForwardBatch
from tokenmill.model.attention.row_extension import Arrays, RowExtension, Sent
from tokenmill.model.sampling.grammar_rows import GrammarRows
from tokenmill.model.sampling.state import SamplingState

if TYPE_CHECKING:
    from tokenmill import _native


class RowState:
    """The stores of rows, which all learn of new rows in one place.

    Args:
        native: kernels that report on prompts; None: torch does.

    Attributes:
        tables: pages and tokens, on the device.
        sampling: sampling parameters of each row. grammars: its grammar.
        prompts: the reports wanted of its prompt.
        extensions: stores of capabilities; all that they hold of a row is theirs alone.
        ended: tell capabilities the outcome of a step; see `RowExtension.ended`.
        heads: find the addition to the model's head for a row; empty: the head is the same for all rows.
    """

    def __init__(
        self,
        tables: RowTables,
        sampling: SamplingState,
        grammars: GrammarRows,
        extensions: Sequence[RowExtension] = (),
        native: _native.Kernels | None = None,
    ) -> None:
        self.tables = tables
        self.sampling = sampling
        self.grammars = grammars
        self.prompts = PromptReports(len(tables.tokens), sampling.vocab_size, native)
        self.extensions = tuple(extensions)
        self.heads = hooks(extensions, RowExtension.head_of)
        stores = (sampling, self.prompts, grammars, *extensions)
        self._enter = hooks(stores, RowExtension.enter)
        self._apply = hooks(stores, RowExtension.apply)
        self._split = hooks(stores, RowExtension.split)
        self._decoded = hooks(stores, RowExtension.decoded)
        self._extend = hooks(stores, RowExtension.extend)
        self.ended = hooks(stores, RowExtension.ended)
        self._close = hooks(stores, RowExtension.close)

    def enter(self, plan: StepPlan, samples: Samples) -> Arrays:
        """Take in the new rows of a plan; return the arrays that `apply` needs on the device."""
        arrays = table_arrays(plan, samples)
        for enter in self._enter:
            arrays |= enter(plan)
        return arrays

    def split(self, plan: StepPlan, query_starts: npt.NDArray[np.int32], first: int) -> Arrays:
        """Return what else the device needs for the requests from the `first` on; see `RowExtension.split`."""
        arrays: Arrays = {}
        for split in self._split:
            arrays |= split(plan, query_starts, first)
        return arrays

    def apply(self, plan: StepPlan, sent: Sent) -> None:
        """Apply the changes of a plan on the device."""
        self.tables.apply(plan, sent)
        for apply in self._apply:
            apply(plan, sent)

    def extend(self, batch: ForwardBatch, plan: StepPlan, first: int, arrays: Arrays, sent: Sent) -> ForwardBatch:
        """Return the batch of a step with the inputs that capabilities add; see `RowExtension.extend`."""
        for extend in self._extend:
            batch = extend(batch, plan, first, arrays, sent)
        return batch

    def decoded(self, sent: Sent) -> None:
        """Update what capabilities keep of rows whose decodes a graph has run."""
        for decoded in self._decoded:
            decoded(sent)

    def close(self) -> None:
        """End the threads of grammars, and close the stores of capabilities."""
        for close in self._close:
            close()
