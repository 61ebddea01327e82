"""`ForwardBatch`: all that one pass of a model needs to know about its tokens, frozen and complete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from tokenmill.model.attention.context_step import ContextStep
    from tokenmill.model.kernels.adapters import AdapterRows
    from tokenmill.model.kernels.heads import RotaryTables
    from tokenmill.model.kernels.states import StepStates
    from tokenmill.platform.arrays import AnyArray


class DeviceLens(msgspec.Struct, frozen=True):
    """Lengths for the kernels of a GPU: context_lens [B] and query_starts [B + 1], int32 on the device."""

    context_lens: AnyArray
    query_starts: AnyArray


class MediaAngles(msgspec.Struct, frozen=True):
    """The angles of a step's tokens, where media have positions of their own.

    Attributes:
        positions: [3, T] int64, of time, row and column; all equal where a token is text.
        axes: [head_dim / 2] int64, the one of the three positions by which each rotary frequency turns.
        rotary: the tables of all layers.
    """

    positions: AnyArray
    axes: AnyArray
    rotary: RotaryTables


class MediaTokens(msgspec.Struct, frozen=True):
    """The extra inputs of a step with media in its requests.

    Attributes:
        angles: None: tokens turn by their places in their sequences, as text does.
        indices: [K] int64, increasing: the places of the placeholders among the T tokens.
        embeddings: [K, 1 + levels, hidden_size], the placeholders' embeddings and the additions to them behind layer 0,
            1, ...; None where K is 0.
        sights: [T] int32, the last position that each token sees, where those of one image see each other: itself, but
            for an image's tokens, which are all in the step. It takes the place of `AttentionLayer.ahead`. None: no
            token sees one behind it.
    """

    angles: MediaAngles | None
    indices: AnyArray
    embeddings: AnyArray | None
    sights: AnyArray | None = None


class BatchPages(msgspec.Struct, frozen=True):
    """Slots and page table of a batch in the memory of a page group; see `ForwardBatch`."""

    slots: AnyArray
    page_table: AnyArray


class ForwardBatch(msgspec.Struct, frozen=True):
    """T tokens of B requests, concatenated in batch order. Arrays are of the model's device; see `ArrayLibrary`.

    |<- request 0: query_lens[0] ->|<- request 1 ->| ... |     T = query_starts[B]

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, position of each token in its own sequence.
        slots: [T] int64, where its KV is written: `page_id * page_size + offset` (page 0: padding).
        page_table: [B, P] int32, page ids of each request; P pages cover the longest context, the rest is 0.
        query_lens: [B] int32 on the host, tokens of each request in this step, >= 1.
        context_lens: [B] int32 on the host, tokens each request attends to at most: computed + scheduled.
        query_starts: [B + 1] int32 on the host, exclusive prefix sum of `query_lens`.
        output_indices: [S] int64, increasing: the tokens that have an output (the last one of each request that
            samples).
        adapters: adapters of the tokens; None if all run on the base model alone.
        media: positions and embeddings where a request has images; None if all tokens are text.
        turned: [T] int64, positions by which tokens are rotated, for decodes of which some have images in their past;
            None for `positions`.
        windows: slots and page table of the window group, 0 where a page is behind the window; None without one.
        states: the states of a model that keeps them; None for other models.
        taps: [T, taps, hidden_size] in the model's dtype, for hidden states at the boundaries that the decoder has been
            told; of the boundary behind the last layer [S, ...]. None: they are not wanted.
        types: [T] int64, rows of an encoder's table of types; None: all tokens are of the first.
        lens: the lengths on the device, if they were sent along with the rest; None if not.
        context: the step as this rank sees it, whose contexts lie on several devices; None: they lie on this one.
        are_own_rows: the tokens are this rank's of a step that ranks share by rows; see `own_rows`.
    """

    token_ids: AnyArray
    positions: AnyArray
    slots: AnyArray
    page_table: AnyArray
    query_lens: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    query_starts: npt.NDArray[np.int32]
    output_indices: AnyArray
    lens: DeviceLens | None = None
    adapters: AdapterRows | None = None
    media: MediaTokens | None = None
    turned: AnyArray | None = None
    windows: BatchPages | None = None
    states: StepStates | None = None
    taps: AnyArray | None = None
    types: AnyArray | None = None
    context: ContextStep | None = None
    are_own_rows: bool = False

    @property
    def in_windows(self) -> ForwardBatch:
        """The same batch with the slots and pages of the window group."""
        assert self.windows is not None, "a window group, and no pages of it"
        return msgspec.structs.replace(self, slots=self.windows.slots, page_table=self.windows.page_table)
