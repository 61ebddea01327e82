"""Names for authors of plug-ins: policies of scheduling and eviction, sources of KV. They stay; modules behind them may
move.
"""

from __future__ import annotations

from tokenmill.core.request import FinishReason, Request
from tokenmill.engine.kv.eviction import EvictionPolicy
from tokenmill.engine.kv.radix_node import RadixNode
from tokenmill.engine.scheduler.policies import AdmissionPolicy, BatchPolicy, QueuePolicy, Step, View
from tokenmill.engine.transfer.orders import PageLoad, PageMover, PageSave
from tokenmill.engine.transfer.protocol import Answer, KeptPages, KVSource, SourceContext

__all__ = [
    "AdmissionPolicy",
    "Answer",
    "BatchPolicy",
    "EvictionPolicy",
    "FinishReason",
    "KVSource",
    "KeptPages",
    "PageLoad",
    "PageMover",
    "PageSave",
    "QueuePolicy",
    "RadixNode",
    "Request",
    "SourceContext",
    "Step",
    "View",
]
