"""Load the draft model that `--speculative-config` names: check it against its target, and choose kernels for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.config.speculation import SpeculativeConfig
from tokenmill.core.errors import InvalidConfig, OutOfMemory
from tokenmill.core.sizes import size_text
from tokenmill.engine.runner.row_tables import RowTables
from tokenmill.engine.speculation.device_drafts import DeviceDrafts, GraphedAttention
from tokenmill.engine.speculation.draft_model import DraftModel, check_draft, num_scratch_pages
from tokenmill.engine.speculation.drafts import StepDrafter
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.mlp_spec import MoeSpec
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.attention.registry import AttentionChoice
from tokenmill.model.attention.row_extension import RowExtension
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.host_model import on_host
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.loader import ModelPlan, plan_model
from tokenmill.platform.protocol import Platform
from tokenmill.startup.machine.device import choose_backend, choose_kernels
from tokenmill.startup.machine.torch_needs import check_torch

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array, ArrayLibrary

# What a draft model may have instead of what the model has, tried in turn where its weights or heads rule that out.
_OTHER_CHOICES: tuple[dict[str, Any], ...] = (
    {"quantization": "none"},
    {"attention_backend": "auto", "kv_cache_dtype": "auto"},
    {"quantization": "none", "attention_backend": "auto", "kv_cache_dtype": "auto"},
)


class Target(NamedTuple):
    """The model to draft for: its architecture, the folder of its tokenizer, and the threads that both models share."""

    architecture: Architecture
    tokenizer: Path
    num_threads: int


class LoadedDraft(msgspec.Struct, frozen=True):
    """A draft model with its weights in memory.

    Attributes:
        num_tokens: the most tokens it drafts.
        note: a clause on where its settings differ from those asked for; "": nowhere.
    """

    folder: Path
    architecture: Architecture
    decoder: Decoder
    attention: AttentionChoice
    weight_bytes: int
    num_tokens: int
    note: str

    @property
    def num_scratch_pages(self) -> int:
        """Number of pages that it needs besides those it shares."""
        return num_scratch_pages(self.num_tokens, self.attention.config.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of its part of a page."""
        return self.attention.bytes_per_page

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the pages that it does not share."""
        return self.num_scratch_pages * self.page_bytes

    def attach(self, target: Decoder) -> None:
        """Take from the target, and tell it, what both need to run; called before either is bound to memory."""

    @property
    def extensions(self) -> tuple[RowExtension, ...]:
        """Its parts of the rows of the target's runner."""
        return ()

    def beside(self, num_pages: int, arrays: ArrayLibrary) -> tuple[Array, ...]:
        """Return memory for what it keeps of each page besides KV, [1, num_pages, ...] each."""
        return ()

    def bind(
        self, attention: AttentionBackend, tables: RowTables, max_model_len: int, beside: tuple[Array, ...]
    ) -> StepDrafter:
        """Return a drafter for the rows of these tables, with its KV in this attention's cache; see `beside`."""
        max_len = min(max_model_len, self.architecture.max_position)
        return DraftModel(on_host(self.decoder, attention), attention, tables, self.num_tokens, max_len)

    def describe(self) -> str:
        """Return a clause for the start-up screen."""
        text = f"{self.folder}, {self.architecture.num_parameters() / 1e6:,.4g} million parameters"
        context = f"drafts up to its context of {self.architecture.max_position:,} tokens"
        return ", ".join(filter(None, (text, context, self.note)))


class DeviceDraft(LoadedDraft, frozen=True):
    """A draft model in the memory of a GPU.

    Attributes:
        platform: captures its passes; None: they are not captured.
    """

    platform: Platform | None

    def bind(
        self, attention: AttentionBackend, tables: RowTables, max_model_len: int, beside: tuple[Array, ...]
    ) -> StepDrafter:
        """Return a drafter that the host does not wait for; see `LoadedDraft.bind`."""
        max_len = min(max_model_len, self.architecture.max_position)
        assert isinstance(attention, GraphedAttention), "a GPU has its attention over pages"
        return DeviceDrafts(self.decoder, attention, tables, self.num_tokens, max_len, self.platform)


def load_draft(
    speculative: SpeculativeConfig,
    config: EngineConfig,
    platform: Platform,
    target: Target,
    folder: Path,
    progress: Callable[[int, int], None],
) -> LoadedDraft:
    """Load the draft model in a folder, in the same formats as the model where its shape allows that.

    Args:
        speculative: the config's settings; they name a draft model.
        config: resolved for the platform.
        progress: called with (bytes done, bytes in all) of the weights.

    Raises:
        InvalidConfig: it cannot draft for this model, or not here.
        InvalidCheckpoint: it cannot be found or read.
        OutOfMemory: it does not fit.
    """
    architecture = read_architecture(folder)
    check_draft(target.architecture, target.tokenizer, architecture, folder)
    loaded = load_decoder(speculative, config, platform, architecture, folder, target.num_threads, progress)
    if not platform.is_accelerator:
        return LoadedDraft(*loaded)
    return DeviceDraft(*loaded, platform if _is_captured(config, architecture) else None)


def _is_captured(config: EngineConfig, architecture: Architecture) -> bool:
    """Return True if passes of a draft model can be captured as graphs; see `device_runners` on those of its target."""
    loops = config.kernels == "torch" and any(isinstance(layer.mlp, MoeSpec) for layer in architecture.layers)
    return not (config.enforce_eager or loops)


def load_decoder(
    speculative: SpeculativeConfig,
    config: EngineConfig,
    platform: Platform,
    architecture: Architecture,
    folder: Path,
    num_threads: int,
    progress: Callable[[int, int], None],
) -> tuple[Path, Architecture, Decoder, AttentionChoice, int, int, str]:
    """Load the weights of what drafts; return the first fields of a `LoadedDraft`.

    Raises:
        InvalidConfig, InvalidCheckpoint, OutOfMemory: see `load_draft`.
    """
    if speculative.quantization is not None:
        config = dataclasses.replace(config, quantization=speculative.quantization)
    is_apart = architecture.draft_head is not None and not architecture.draft_head.projects_pairs
    load_format = "dummy" if config.load_format == "dummy" and not is_apart else "auto"
    plan, attention, note = _choose(config, platform, folder, architecture, num_threads, load_format)
    free = platform.available_bytes()
    if plan.weight_bytes + plan.spare_bytes > free:
        needed = size_text(plan.weight_bytes + plan.spare_bytes)
        raise OutOfMemory(f"the draft model {folder} needs {needed} of memory and {size_text(free)} are free")
    decoder = plan.load(progress)
    return folder, architecture, decoder, attention, plan.weight_bytes, speculative.most_tokens, note


def _choose(
    config: EngineConfig,
    platform: Platform,
    folder: Path,
    architecture: Architecture,
    num_threads: int,
    load_format: str,
) -> tuple[ModelPlan, AttentionChoice, str]:
    """Choose kernels and attention for the draft model, like the model's where possible; says what differs and why."""
    refusal: InvalidConfig | None = None
    if platform.is_accelerator:
        # The only attention on GPUs that takes in its graphs what no host has planned.
        config = dataclasses.replace(config, attention_backend="triton")
    for choices in (dict[str, Any](), *_OTHER_CHOICES):
        own = dataclasses.replace(config, **choices)
        try:
            check_torch(own, architecture, platform)
            kernels, _ = choose_kernels(own, platform, folder, num_threads)
            plan = plan_model(folder, architecture, kernels, load_format)
            attention = choose_backend(own, platform, plan.shapes.attention_spec, kernels)
        except InvalidConfig as error:
            refusal = refusal or error
            continue
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in choices.items())
        return plan, attention, f"{flags}: {refusal}" if flags else ""
    assert refusal is not None, "something was refused"
    raise refusal
