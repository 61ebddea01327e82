"""Load an EAGLE-3 head for a model: check that they fit, decide where the model is tapped, read the head's tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tokenmill.config.configs import EngineConfig
from tokenmill.config.model_files import read_json
from tokenmill.config.speculation import SpeculativeConfig
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.engine.runner.row_tables import RowTables
from tokenmill.engine.speculation.eagle_head import EagleHead, HeadParts
from tokenmill.engine.speculation.step_taps import StepTaps
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.architecture.draft_head_spec import DraftHeadSpec
from tokenmill.model.attention.protocol import AttentionBackend
from tokenmill.model.attention.row_extension import RowExtension
from tokenmill.model.models.decoder import Decoder
from tokenmill.model.models.draft_head_config import read_draft_head
from tokenmill.model.models.gguf_table import num_drafting_layers
from tokenmill.model.models.host_model import on_host
from tokenmill.model.models.mtp_config import num_mtp_layers, read_mtp
from tokenmill.model.weights.checkpoint import CONFIG_NAME, Checkpoint, open_checkpoint
from tokenmill.model.weights.gguf.file import open_gguf
from tokenmill.model.weights.gguf.folder import LINK_NAME
from tokenmill.model.weights.stored_part import read_mapped
from tokenmill.platform.arrays import itemsize
from tokenmill.platform.host_arrays import host_array
from tokenmill.platform.protocol import Platform
from tokenmill.startup.assembly.draft_loading import LoadedDraft, Target, load_decoder

if TYPE_CHECKING:
    from tokenmill.platform.arrays import Array, ArrayLibrary

logger = logging.getLogger(__name__)

TOKENS_NAME = "d2t"


class LoadedHead(LoadedDraft, frozen=True):
    """An EAGLE-3 head, or a model's MTP layer, with its weights in memory.

    Attributes:
        taps: what it takes of each step of its target. boundaries: where.
        token_ids: [D], the target's token that each of its own stands for; None: the same.
    """

    taps: StepTaps
    boundaries: tuple[int, ...]
    token_ids: npt.NDArray[np.int64] | None
    dtype: str

    @property
    def spec(self) -> DraftHeadSpec:
        """Description of the head."""
        assert self.architecture.draft_head is not None, "it is one"
        return self.architecture.draft_head

    @property
    def page_bytes(self) -> int:
        """Bytes of its part of a page: of KV, and of what it takes for each token."""
        tokens = self.attention.config.page_size
        return self.attention.bytes_per_page + tokens * self.architecture.hidden_size * itemsize(self.dtype)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the pages that it does not share, which have KV alone."""
        return self.num_scratch_pages * self.attention.bytes_per_page

    @property
    def extensions(self) -> tuple[RowExtension, ...]:
        """The taps of each step."""
        return (self.taps,)

    def attach(self, target: Decoder) -> None:
        """Tap the target; share its embedding and output head where the head has none."""
        target.boundaries = self.boundaries
        self.decoder.borrow(target)

    def beside(self, num_pages: int, arrays: ArrayLibrary) -> tuple[Array, ...]:
        """Return memory for g of each token, [1, num_pages, page_size, hidden_size]."""
        shape = 1, num_pages, self.attention.config.page_size, self.architecture.hidden_size
        return (arrays.zeros(shape, self.dtype),)

    def bind(
        self, attention: AttentionBackend, tables: RowTables, max_model_len: int, beside: tuple[Array, ...]
    ) -> EagleHead:
        """Return a drafter for the rows of these tables, with its KV in this attention's cache; see `beside`."""
        (memory,) = (host_array(array).reshape(-1, self.architecture.hidden_size) for array in beside)
        model, max_len = on_host(self.decoder, attention), min(max_model_len, self.architecture.max_position)
        parts = HeadParts(self.taps, memory, self.token_ids, self.spec.recycles_normed)
        return EagleHead(model, attention, tables, self.num_tokens, max_len, parts)

    def describe(self) -> str:
        """Return a clause for the start-up screen."""
        if self.spec.projects_pairs:
            return f"{LoadedDraft.describe(self)}, the model's own MTP layer"
        places = ", ".join(map(str, self.boundaries))
        taps = f"an EAGLE-3 head on the hidden states behind {places} layers"
        return f"{LoadedDraft.describe(self)}, {taps}"


def load_head(
    speculative: SpeculativeConfig,
    config: EngineConfig,
    platform: Platform,
    target: Target,
    folder: Path,
    progress: Callable[[int, int], None],
) -> LoadedHead:
    """Load the head in a folder; see `load_draft`.

    Raises:
        InvalidConfig, InvalidCheckpoint, OutOfMemory: it cannot draft for this model, cannot be read, or does not fit.
    """
    _check_ranks(config)
    checkpoint, path = open_checkpoint(folder), folder / CONFIG_NAME
    architecture = read_draft_head(read_json(folder, CONFIG_NAME), str(path), checkpoint.tensors)
    spec = architecture.draft_head
    assert spec is not None, "it is one"
    _check(target.architecture, architecture, spec, folder)
    boundaries = _boundaries(speculative, spec, target.architecture, folder)
    token_ids = _token_ids(checkpoint, spec, architecture.vocab_size)
    loaded = load_decoder(speculative, config, platform, architecture, folder, target.num_threads, progress)
    taps = StepTaps((spec.num_taps, spec.tapped_size), config.dtype, platform.arrays)
    return LoadedHead(*loaded, taps, boundaries, token_ids, config.dtype)


def load_mtp(
    speculative: SpeculativeConfig,
    config: EngineConfig,
    platform: Platform,
    target: Target,
    folder: Path,
    progress: Callable[[int, int], None],
) -> LoadedHead:
    """Load the MTP layer that a model's own checkpoint has; see `load_draft`.

    Raises:
        InvalidConfig, InvalidCheckpoint, OutOfMemory: there is none, or none that can be read here; it does not fit.
    """
    _check_ranks(config)
    num_layers = 1 if config.load_format == "dummy" else _num_mtp_layers(folder)
    architecture = read_mtp(target.architecture, num_layers, str(folder))
    loaded = load_decoder(speculative, config, platform, architecture, folder, target.num_threads, progress)
    spec = architecture.draft_head
    assert spec is not None and spec.boundaries is not None, "it drafts from the model's outputs"
    taps = StepTaps((1, spec.tapped_size), config.dtype, platform.arrays)
    return LoadedHead(*loaded, taps, spec.boundaries, None, config.dtype)


def _num_mtp_layers(folder: Path) -> int:
    if (folder / LINK_NAME).exists():
        return num_drafting_layers(open_gguf(folder / LINK_NAME))
    return num_mtp_layers(read_json(folder, CONFIG_NAME), str(folder / CONFIG_NAME), open_checkpoint(folder).tensors)


def _check_ranks(config: EngineConfig) -> None:
    if config.num_ranks > 1:
        raise InvalidConfig(
            "--speculative-config: a draft head takes the hidden states of a model that one rank runs: leave out "
            "--tensor-parallel-size and --pipeline-parallel-size, or take suffix"
        )


def _check(target: Architecture, head: Architecture, spec: DraftHeadSpec, folder: Path) -> None:
    """Check that a head fits the model's shape.

    Raises:
        InvalidConfig: it does not, in one sentence.
    """
    sizes = {
        "takes hidden states of size": (spec.tapped_size, target.hidden_size),
        "has a vocabulary of": (head.vocab_size, target.vocab_size),
    }
    if not spec.has_embedding:
        sizes["embeds tokens as its model does, in vectors of size"] = (head.hidden_size, target.hidden_size)
    if not spec.has_head:
        sizes["has its model's output head, for hidden states of size"] = (head.hidden_size, target.hidden_size)
        sizes["has its model's output head, but draft tokens by the number of"] = (spec.vocab_size, target.vocab_size)
    for clause, (own, wanted) in sizes.items():
        if own != wanted:
            raise InvalidConfig(
                f"--speculative-config: the head {folder} {clause} {own:,}, the model has {wanted:,}: "
                "take a head that was trained for this model"
            )


def _boundaries(
    speculative: SpeculativeConfig, spec: DraftHeadSpec, target: Architecture, folder: Path
) -> tuple[int, ...]:
    """Return behind how many layers the target is tapped: as asked for, as the head says, or as is usual.

    Raises:
        InvalidConfig: there are others, or no such layers.
    """
    layers, given = len(target.layers), speculative.eagle_aux_hidden_state_layer_ids or spec.boundaries
    found = given or (min(2, layers - 1), layers // 2, max(layers - 3, 0))
    if given is None:
        logger.warning(
            "%s does not say where its model is tapped: behind %s layers, as usual; if drafts are never right, it is "
            "elsewhere, which eagle_aux_hidden_state_layer_ids of --speculative-config gives",
            folder / CONFIG_NAME,
            ", ".join(map(str, found)),
        )
    if len(found) != spec.num_taps or not all(0 <= one < layers for one in found):
        raise InvalidConfig(
            f"--speculative-config: eagle_aux_hidden_state_layer_ids must be {spec.num_taps} numbers from 0 to "
            f"{layers - 1} for this head and model, got {list(found)}"
        )
    return tuple(found)


def _token_ids(checkpoint: Checkpoint, spec: DraftHeadSpec, vocab_size: int) -> npt.NDArray[np.int64] | None:
    """Return the target's token for each of the head's: stored are the differences. None: they are the same.

    Raises:
        InvalidCheckpoint: they are missing, misshapen or outside of the vocabulary.
    """
    stored = checkpoint.tensors.get(TOKENS_NAME)
    if stored is None:
        if spec.vocab_size != vocab_size:
            raise InvalidCheckpoint(
                f"{checkpoint.source} has no tensor {TOKENS_NAME}, which draft_vocab_size calls for"
            )
        return None
    if tuple(stored.shape) != (spec.vocab_size,) or stored.dtype not in ("I64", "I32"):
        raise InvalidCheckpoint(
            f"{stored.file}: tensor {TOKENS_NAME} must have {spec.vocab_size} integers, as draft_vocab_size says; got "
            f"{list(stored.shape)} of {stored.dtype}"
        )
    token_ids = read_mapped(stored).values.astype(np.int64) + np.arange(spec.vocab_size)
    if len(token_ids) and not (token_ids.min() >= 0 and token_ids.max() < vocab_size):
        raise InvalidCheckpoint(f"{stored.file}: tensor {TOKENS_NAME} names tokens outside of the vocabulary")
    return token_ids
