"""Names for authors of plug-ins: scheduling policies and sources of KV. They stay; modules behind them may move."""

from __future__ import annotations

from tokenmill.core.request import FinishReason, Request
from tokenmill.engine.scheduler.policies import AdmissionPolicy, BatchPolicy, QueuePolicy, Step, View
from tokenmill.engine.transfer.orders import PageLoad, PageMover, PageSave
from tokenmill.engine.transfer.protocol import Answer, KeptPages, KVSource, SourceContext

__all__ = [
    "AdmissionPolicy",
    "Answer",
    "BatchPolicy",
    "FinishReason",
    "KVSource",
    "KeptPages",
    "PageLoad",
    "PageMover",
    "PageSave",
    "QueuePolicy",
    "Request",
    "SourceContext",
    "Step",
    "View",
]
