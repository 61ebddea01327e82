"""`RowState`: keep all state of the rows of running requests. A plan names rows; their contents are here."""

from __future__ import annotations

from tokenmill.core.plan import StepPlan
from tokenmill.engine.runner.prompt_reports import PromptReports
from tokenmill.engine.runner.row_recurrences import RowRecurrences
from tokenmill.engine.runner.row_tables import RowTables, table_arrays
from tokenmill.engine.runner.samples import Samples
from tokenmill.engine.runner.transport import Arrays, Sent
from tokenmill.model.adapters.rows import RowAdapters
from tokenmill.model.sampling.grammar_rows import GrammarRows
from tokenmill.model.sampling.state import SamplingState
from tokenmill.model.vision.encoder import Encoder


class RowState:
    """The stores of rows, which all learn of new rows in one place.

    Attributes:
        tables: pages and tokens, on the device.
        sampling: sampling parameters of each row. grammars: its grammar.
        prompts: the reports wanted of its prompt.
        adapters: its adapter; None: the engine has none.
        encoder: its images; None: the model takes text only.
        recurrences: the slot of its recurrent state; None: the model has none.
    """

    def __init__(
        self,
        tables: RowTables,
        sampling: SamplingState,
        grammars: GrammarRows,
        adapters: RowAdapters | None = None,
        encoder: Encoder | None = None,
        recurrences: RowRecurrences | None = None,
    ) -> None:
        self.tables = tables
        self.sampling = sampling
        self.grammars = grammars
        self.adapters = adapters
        self.encoder = encoder
        self.recurrences = recurrences
        self.prompts = PromptReports(len(tables.tokens), sampling.vocab_size)

    def enter(self, plan: StepPlan, samples: Samples) -> Arrays:
        """Take in the new rows of a plan; return the arrays that `apply` needs on the device."""
        for new_row in plan.new_rows:
            self.sampling.set(new_row)
            self.prompts.set(new_row)
        self.grammars.set(plan.new_rows)
        arrays = table_arrays(plan, samples)
        if self.recurrences is not None:
            arrays |= self.recurrences.enter(plan)
        if self.adapters is not None:
            arrays |= self.adapters.set(plan)
        if self.encoder is not None:
            arrays |= self.encoder.set(plan)
        return arrays

    def apply(self, plan: StepPlan, sent: Sent) -> None:
        """Apply the changes of a plan on the device."""
        self.tables.apply(plan, sent)
        if self.adapters is not None:
            self.adapters.apply(sent)
        if self.encoder is not None:
            self.encoder.apply(plan, sent)
        if self.recurrences is not None:
            self.recurrences.apply(sent)

    def close(self) -> None:
        """End the threads of grammars."""
        self.grammars.close()
