"""Models whose tokens attend to those after them: a request is whole in a step, and holds no KV when it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

from tokenmill.config.configs import EngineConfig
from tokenmill.core.errors import InvalidConfig
from tokenmill.core.scheduling import Feature
from tokenmill.engine.kv.page_pool import RESERVED_PAGES
from tokenmill.engine.scheduler.scheduler import find_scheduler
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.attention.row_extension import RowExtension
from tokenmill.model.models.text_inputs import WholeTexts
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.memory import StepMemory
from tokenmill.startup.sizing.kv_size import wanted_context


class Encoders(Capability):
    """The settings of their steps: no chunks, no prefixes, and a budget that has room for the longest text.

    Args:
        has_types: the model tells the texts of a pair apart by types of their tokens.
    """

    def __init__(self, has_types: bool) -> None:
        self._has_types = has_types

    @classmethod
    def check(cls, config: EngineConfig, architecture: Architecture, platform: Platform) -> None:
        """Refuse what encoders do not have."""
        if architecture.needs_kv:
            return
        refused = {
            "--enable-lora": config.enable_lora,
            "--lora-merge": config.lora_merge is not None,
            "--speculative-config": config.speculative_config is not None,
            "--kv-disk": config.kv_disk is not None,
            "--slot-save-path": config.slot_save_path is not None,
            "--kv-host-size": config.kv_host_size is not None,
            "--kv-source": bool(config.kv_source),
            "--kv-transfer-config": config.kv_transfer_config is not None,
            "--kv-cache-dtype": config.kv_cache_dtype not in (None, "auto"),
        }
        for flag, is_given in refused.items():
            if is_given:
                what = "adapters" if "lora" in flag else "drafts" if "speculative" in flag else "KV to keep"
                raise InvalidConfig(f"{flag}: {architecture.name} is an encoder and has no {what}; leave it out")
        if Feature.WHOLE_PROMPTS not in find_scheduler(config.scheduler_cls).serves:
            raise InvalidConfig(
                f"{architecture.name} has {Feature.WHOLE_PROMPTS}, which --scheduler-cls {config.scheduler_cls} does "
                "not serve"
            )

    @classmethod
    def install(cls, assembly: Assembly) -> Self | None:
        """Settle the budget and the form of steps."""
        architecture, config = assembly.model.architecture, assembly.config
        if architecture.needs_kv:
            return None
        longest = wanted_context(config, architecture.max_position)
        assembly.config = dataclasses.replace(
            config,
            enable_chunked_prefill=False,
            enable_prefix_caching=False,
            max_num_batched_tokens=max(config.step_budget, longest),
        )
        inputs = architecture.inputs
        return cls(inputs is not None and inputs.token_types > 1)

    def row_extensions(self, memory: StepMemory) -> Sequence[RowExtension]:
        """Return the pages of a step's texts, and the types of their tokens."""
        tables = memory.tables
        return (WholeTexts(len(tables.tokens), tables.page_size, RESERVED_PAGES, has_types=self._has_types),)
