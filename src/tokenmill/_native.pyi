"""The extension module that native/ builds: its names and types. Every Address is a Tensor.data_ptr()."""

from collections.abc import Sequence
from typing import TypeAlias

Address: TypeAlias = int

class Kernels:
    """The kernels of one instruction set, with the number of threads that they may use.

    Raises:
        ValueError: the machine or the build does not have the level.
    """

    def __init__(self, isa: str, threads: int) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    def pack(
        self,
        weights: Packed,
        start: int,
        source: Address,
        count: int,
        stride: int,
        element: int,
        importance: Address,
        feedback: Address,
        span: int,
    ) -> None: ...
    def pack_integers(
        self,
        weights: Packed,
        start: int,
        values: Address,
        count: int,
        scales: Address,
        offsets: Address,
        groups: int,
    ) -> None: ...
    def pack_blocks(self, weights: Packed, start: int, blocks: Address, count: int, kind: int) -> None:
        """Pack rows of llama.cpp's blocks.

        Raises:
            ValueError: blocks of this kind do not fit the matrix.
        """

    def linear(
        self,
        weights: Packed,
        x: Address,
        count: int,
        stride: int,
        out: Address,
        out_stride: int,
        element: int,
        bias: Address,
        gate: int,
    ) -> None: ...
    def argmax(self, weights: Packed, x: Address, count: int, stride: int, ids: Address, values: Address) -> None: ...
    def lookup(self, weights: Packed, ids: Address, count: int, out: Address) -> None: ...
    def rms_norm(
        self,
        x: Address,
        x_stride: int,
        delta: Address,
        delta_stride: int,
        delta_scale: float,
        weight: Address,
        is_offset: bool,
        eps: float,
        out: Address,
        count: int,
        size: int,
    ) -> None: ...
    def layer_norm(
        self,
        x: Address,
        x_stride: int,
        delta: Address,
        delta_stride: int,
        weight: Address,
        bias: Address,
        eps: float,
        out: Address,
        count: int,
        size: int,
    ) -> None: ...
    def activate(self, x: Address, count: int, activation: int) -> None: ...
    def short_conv(
        self,
        rows: StateRows,
        x: Address,
        x_stride: int,
        weight: Address,
        bias: Address,
        state: Address,
        state_stride: int,
        out: Address,
        channels: int,
        width: int,
        silu: bool,
    ) -> None: ...
    def delta_rule(
        self,
        rows: StateRows,
        mixed: Address,
        mixed_stride: int,
        gates: Address,
        gates_stride: int,
        a_log: Address,
        dt_bias: Address,
        state: Address,
        state_stride: int,
        out: Address,
        key_heads: int,
        value_heads: int,
        key_size: int,
        value_size: int,
    ) -> None: ...
    def state_space(
        self,
        rows: StateRows,
        mixed: Address,
        mixed_stride: int,
        steps: Address,
        steps_stride: int,
        a_log: Address,
        dt_bias: Address,
        skip: Address,
        state: Address,
        state_stride: int,
        out: Address,
        heads: int,
        groups: int,
        size: int,
        state_size: int,
    ) -> None: ...
    def gated_norm(
        self,
        x: Address,
        x_stride: int,
        gate: Address,
        gate_stride: int,
        weight: Address,
        eps: float,
        out: Address,
        count: int,
        heads: int,
        size: int,
        gates_first: bool,
    ) -> None: ...
    def sigmoid_gate(
        self, x: Address, x_stride: int, gate: Address, gate_stride: int, out: Address, count: int, size: int
    ) -> None: ...
    def multiply_rows(
        self, x: Address, x_stride: int, gate: Address, gate_stride: int, out: Address, count: int, size: int
    ) -> None: ...
    def scaled_sum(self, x: Address, delta: Address, delta_scale: float, factor: float, count: int) -> None: ...
    def add_weighted(
        self, x: Address, weights: Address, rows: Address, out: Address, count: int, size: int
    ) -> None: ...
    def rotary_tables(self, frequencies: Address, positions: int, size: int, cos: Address, sin: Address) -> None: ...
    def route(
        self,
        logits: Address,
        stride: int,
        count: int,
        experts: int,
        chosen: int,
        normalizes: bool,
        ids: Address,
        weights: Address,
        are_sigmoids: bool,
        bias: Address,
        scale: float,
    ) -> None: ...
    def draw(self, logits: Address, stride: int, size: int, count: int, draws: Address, ids: Address) -> None: ...
    def logprobs(
        self,
        logits: Address,
        stride: int,
        size: int,
        count: int,
        rows: Address,
        tokens: Address,
        lowest: float,
        logprobs: Address,
        ranks: Address,
        largest: int,
        top_ids: Address,
        top_logprobs: Address,
    ) -> None: ...
    def apply_token_bitmask(
        self, logits: Address, stride: int, size: int, count: int, rows: Address, bits: Address
    ) -> None: ...
    def apply_penalties(
        self,
        logits: Address,
        stride: int,
        count: int,
        indices: Address,
        rows: Address,
        num_prompt_tokens: Address,
        positions: Address,
        presence: Address,
        frequency: Address,
        repetition: Address,
        tokens: Address,
        tokens_stride: int,
    ) -> None: ...
    def copy_pages(
        self, parts: Address, num_parts: int, pages: Address, count: int, data: Address, checksums: Address, way: int
    ) -> None: ...

class Packed:
    """The shape of a packed matrix, and where its bytes are; see docs/native.md.

    Raises:
        ValueError: a shape without rows or inputs, or a gated one whose rows are not two halves.
    """

    def __init__(self, format: int, rows: int, depth: int, gated: bool) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    def place(self, data: Address) -> None: ...
    def add_part(self, part: Packed) -> None:
        """Add the next rows of a matrix of parts; their memory is placed already."""

class StateRows:
    """Slots [requests] int64, and where their tokens start and stop, [requests] int32 each; all stay where they are."""

    def __init__(self, slots: Address, starts: Address, stops: Address, requests: int, keeps: bool) -> None: ...

class PlannedStep:
    """The pieces of work that the attention of a step is divided into."""

    @property
    def shared_splits(self) -> list[int]:
        """The number of leading KV splits of each request that are read for several requests at once."""

class KVNumbers:
    """Keys or values of a layer: bf16, int8 or int4 (format 0, 1, 2). Numbers and scales from a page to the next."""

    def __init__(
        self, numbers: Address, page_numbers: int, format: int, scales: Address = 0, page_scales: int = 0
    ) -> None: ...

class LayerKV:
    """KV memory of one layer."""

    def __init__(self, keys: KVNumbers, values: KVNumbers) -> None: ...

class HeadNorms:
    """Weights of the norms of q, k and v; 0 where the model has none."""

    def __init__(self, q: Address, k: Address, v: Address, eps: float, are_offsets: bool) -> None: ...

class AttentionLayer:
    """The attention of one layer; cos and sin are 0 where it does not rotate, window, sinks, slopes if it has none."""

    def __init__(
        self,
        memory: LayerKV,
        norms: HeadNorms,
        cos: Address,
        sin: Address,
        scale: float,
        window: int,
        sinks: Address,
        reads_only: bool = False,
        first: int = 0,
        ahead: int = 0,
        slopes: Address = 0,
    ) -> None: ...

class ContextRanks:
    """Ranks that share the attention of steps; see native/context_ranks.h. Zeroed memory that all of them map."""

    def __init__(
        self,
        ranks: Ranks,
        rank: int,
        size: int,
        memory: Address,
        partial_numbers: int,
        pending_numbers: int,
        output_numbers: int,
    ) -> None: ...
    @property
    def has_failed(self) -> bool: ...

class Attention:
    """The attention of one model; see docs/native.md."""

    def __init__(
        self, kernels: Kernels, heads: int, kv_heads: int, head_dim: int, page_size: int, is_causal: bool = True
    ) -> None: ...
    def plan(
        self,
        requests: int,
        query_starts: Address,
        context_lens: Address,
        page_table: Address,
        page_stride: int,
        cos: Address,
        sin: Address,
        are_own_rows: bool = False,
        sights: Address = 0,
    ) -> PlannedStep:
        """`cos`, `sin`: of the step's own tokens, [tokens][head_dim / 2]; 0: they follow from where these stand.

        `are_own_rows`: of ranks that share a context each has a step of its own.
        `sights`: the last position that each token sees, int32 [tokens]; 0: itself, or as the layers say.
        """

    def share(self, ranks: ContextRanks) -> None:
        """Share all later steps with other ranks."""

    def forward(self, step: PlannedStep, layer: AttentionLayer, qkv: Address, out: Address) -> None: ...

class Projection:
    """A packed matrix with its bias, or 0. The bytes of the matrix have to be placed before.

    `column`: where its outputs begin among those of all ranks.
    """

    def __init__(self, weights: Packed, bias: Address, column: int) -> None: ...
    def observe(self, sums: Address, rows: Address, first: Address, most: int) -> None:
        """Note its inputs: squares [depth] of float64, the number of rows, int64, and the first rows, [most, depth]."""

class Norm:
    """A norm of hidden states: without a weight it is absent, and without a bias nothing is added."""

    def __init__(self, weight: Address, bias: Address) -> None: ...

class LayerNorms:
    """A layer's norms, before its blocks and behind them; or, if they are of sums, of hidden states and additions."""

    def __init__(self, attention: Norm, attention_out: Norm, mlp: Norm, mlp_out: Norm, are_of_sums: bool) -> None: ...

class DecoderAttention:
    """The attention of one layer; `gate`: its sigmoid multiplies what it gives; `repeated`: numbers of k that are v."""

    def __init__(
        self, group: int, qkv: Projection, layer: AttentionLayer, gate: Projection | None, repeated: int
    ) -> None: ...
    def norm_heads(self, q: Address, q_size: int, k: Address, k_size: int, eps: float, are_offsets: bool) -> None:
        """Norm all heads of q together, and those of k."""

class Recurrence:
    """A short convolution, a gated delta network or a state space in the place of attention; see native/decoder.h."""

    def __init__(self, inputs: Projection, filters: Address, bias: Address, channels: int, width: int) -> None: ...
    def delta_net(
        self,
        z: Projection,
        gates: Projection,
        a_log: Address,
        dt_bias: Address,
        norm: Address,
        eps: float,
        key_heads: int,
        value_heads: int,
        key_size: int,
        value_size: int,
    ) -> None: ...
    def state_space(
        self,
        steps: Projection,
        a_log: Address,
        dt_bias: Address,
        skip: Address,
        norm: Address,
        eps: float,
        heads: int,
        groups: int,
        size: int,
        state_size: int,
    ) -> None: ...

class StateMemory:
    """The states of the layers that keep any: addresses and numbers of a slot. Matrices are 0 where there are none."""

    def __init__(self) -> None: ...
    def add(self, inputs: Address, inputs_size: int, matrices: Address, matrices_size: int) -> None: ...

class StepStates:
    """The layers that a step's tokens run through; see native/decoder.h."""

    def __init__(
        self,
        memory: StateMemory,
        first: StateRows,
        rest: StateRows | None,
        sources: Address,
        targets: Address,
        copies: int,
    ) -> None: ...
    def add_drafts(self, drafts: StateRows, kept: list[tuple[Address, Address]]) -> None: ...

class MixtureNorms:
    """Norms of a mixture's own, [hidden] each; see native/decoder.h."""

    def __init__(
        self, router: Address, inputs: Address, mixed: Address, shared: Address, router_scale: float
    ) -> None: ...

class FeedForward:
    """The feed-forward block of a layer: dense, a mixture of experts, or both; see native/decoder.h."""

    def __init__(self) -> None: ...
    def run_all(self, first: Projection, down: Projection, gate: int, activation: int) -> None:
        """Send all tokens through a pair of projections. `gate`: of a first one that is gated, else `activation`."""

    def mix(
        self,
        router: Projection,
        experts: Experts,
        per_token: int,
        normalizes: bool,
        shared_gate: Projection | None,
        are_sigmoids: bool,
        bias: Address,
        scale: float,
        scales: Address,
        norms: MixtureNorms | None,
    ) -> None:
        """Send each token to some of the experts; a pair of its own is an expert of all tokens, perhaps gated."""

class DecoderLayer:
    """The weights and the KV memory of one layer, with attention or a recurrence; see native/decoder.h."""

    def __init__(
        self,
        norms: LayerNorms,
        attention: DecoderAttention | None,
        recurrence: Recurrence | None,
        output: Projection,
        block: FeedForward,
        residual_multiplier: float,
        end: LayerEnd,
    ) -> None: ...
    def pair(self, norm: Address, begins_stream: bool) -> None: ...

class LayerEnd:
    """A third block and a number that multiplies a layer's output, where they are; see native/decoder.h."""

    def __init__(self) -> None: ...
    def multiply(self, scalar: Address) -> None: ...
    def gate(self, gate: Projection, output: Projection, norm: Address) -> None: ...

class Adapter:
    """The matrices that an adapter adds to those of each layer: 0 qkv, 1 output, 2 gate_up or up, 3 down."""

    def __init__(self, layers: int) -> None: ...
    def shrink(self, layer: int, matrix: int, a: Address, ranks: int, depth: int) -> None:
        """A: [ranks][depth] of bf16, of all parts of the matrix."""

    def expand(
        self,
        layer: int,
        matrix: int,
        b: Address,
        column: int,
        columns: int,
        rank_start: int,
        rank: int,
        scale: float,
    ) -> None:
        """A part's B: [blocks of ADAPTER_BLOCK columns][rank][ADAPTER_BLOCK] of bf16, padded with zeros."""

    def embed(self, a: Address, rank: int, b: Packed, scale: float) -> None:
        """Set the addition to embeddings; a: [vocabulary][rank] of bf16."""

class StepMedia:
    """Rows in the place of embeddings, and others to add behind the first layers; see native/decoder.h."""

    def __init__(self, tokens: Address, count: int, values: Address, levels: int) -> None: ...

class Experts:
    """The experts of a layer, mixed in one call; see native/experts.h. The weights stay where they are."""

    def __init__(self, kernels: Kernels, gate: int, hidden: int, size: int) -> None: ...
    def add(self, gate_up: Packed, down: Packed, gate_up_bias: Address, down_bias: Address) -> None: ...
    def observe(self, number: int, gate_up: Address, gate_up_rows: Address, down: Address, down_rows: Address) -> None:
        """Note the inputs of an expert's matrices; see `Projection.observe`."""

    def share(self, first: int, total: int) -> None:
        """Be some of all experts, from the first on: ranks have the others."""
    def mix(
        self,
        x: Address,
        x_stride: int,
        tokens: int,
        per_token: int,
        chosen: Address,
        weights: Address,
        out: Address,
    ) -> None: ...

class Decoder:
    """A decoder whose forward pass is one call, and its head."""

    def __init__(
        self,
        attentions: Sequence[Attention],
        hidden_size: int,
        eps: float,
        norms_are_offsets: bool,
        norms_are_centered: bool,
    ) -> None: ...
    def begin(self, embedding: Packed, multiplier: float) -> None: ...
    def add_inputs(self, positions: Packed | None, types: Packed | None, norm: Norm) -> None:
        """Add rows of these tables to the embeddings, and norm the sum."""

    def end(self, norm: Norm) -> None:
        """Say that no layers follow elsewhere, and which norm the last one's output goes through."""
    def give_inputs(
        self,
        projection: Projection,
        norm: Address,
        size: int,
        table: Address,
        element: int,
        projection_scale: float,
        table_scale: float,
    ) -> None:
        """Give layers inputs of their own; see native/decoder.h."""

    def add(self, layer: DecoderLayer) -> None: ...
    def tap(self, boundaries: Sequence[int]) -> None: ...
    def gather(self, ranks: Ranks, shared: Address, first_token: int, first_head: int) -> None: ...
    def shared_numbers(self, tokens: int) -> int: ...
    def scratch_numbers(self, tokens: int) -> int: ...
    def forward(
        self,
        steps: Sequence[PlannedStep],
        token_ids: Address,
        hidden: Address,
        position_rows: Address,
        types: Address,
        tokens: int,
        output_indices: Address,
        outputs: int,
        of_token: Address,
        adapters: Sequence[Adapter],
        media: StepMedia,
        states: StepStates | None,
        taps: Address,
        scratch: Address,
        out: Address,
    ) -> bool:
        """False: the other ranks have not come."""

    def logits(self, head: Packed, hidden: Address, count: int, out: Address) -> None:
        """Write [count][rows of the head] of float32."""

    def best(self, head: Packed, hidden: Address, count: int, ids: Address, values: Address) -> None:
        """Write the row of the largest logit, the lowest of equals, and its value; see `LinearWeight.best`."""

class Ranks:
    """The place where ranks wait for each other; see native/ranks.h. Outcomes: 0 over, 1 timeout, 2 given up, 3 gone.

    Args:
        memory: RANKS_BYTES that all ranks map, zeros at first.
        spin, timeout: in seconds.
        peers: descriptors that can be read once a peer is gone.
    """

    def __init__(
        self, memory: Address, rank: int, size: int, spin: float, timeout: float, peers: list[int]
    ) -> None: ...
    def meet(self, timeout: float) -> int: ...
    def wait_taken(self, most: int) -> int: ...
    def post(self) -> None: ...
    def wait_post(self, timeout: float) -> int: ...
    def take(self) -> None: ...
    def give_up(self) -> None: ...
    @property
    def last_meeting(self) -> int:
        """The outcome of the last one."""
    @property
    def rank_that_gave_up(self) -> int:
        """-1: none has."""

RANKS_BYTES: int
ADAPTER_BLOCK: int
MOST_RANKS: int

def crc32c(data: Address, size: int, before: int) -> int:
    """The CRC-32C of memory; `before`: of what stands before it, else 0."""

def read_strings(data: Address, size: int, count: int) -> list[str]:
    """Read strings that stand behind their lengths of eight bytes, as in a header of GGUF.

    Raises:
        IndexError: the bytes end before.
    """

def strings_size(data: Address, size: int, count: int) -> int:
    """Return the bytes that so many of these strings take together, with their lengths.

    Raises:
        IndexError: the bytes end before.
    """

def available_isas() -> list[str]:
    """Levels that are built and that this machine runs, lowest first."""

class Vocabulary:
    """A mapped file of tokens and merges; ValueError for memory that is none. The memory must outlive it."""

    def __init__(self, data: Address, size: int) -> None: ...
    def is_unchanged(self) -> bool:
        """Return True if the checksum is that of the content: all of it is read."""
    @property
    def num_ids(self) -> int:
        """The highest id and one."""
    @property
    def num_tokens(self) -> int: ...
    @property
    def longest(self) -> int:
        """Characters of the longest token."""
    @property
    def notes(self) -> bytes: ...
    def token(self, id: int) -> str | None: ...
    def token_id(self, spelling: str) -> int | None: ...
    def spelling(self, id: int) -> bytes: ...
    def flags(self, id: int) -> int:
        """1: of the model; 2: added; 4: special."""

class PieceEncoder:
    """Byte-pair encoding of pieces of text.

    Args:
        added: ids of added tokens.
        spelling, prefix: as in `tokenmill.model.vocabulary.recipe`.
    """

    def __init__(
        self, vocabulary: Vocabulary, added: list[int], spelling: int, prefix: int, is_split: bool
    ) -> None: ...
    def encode(self, text: str, numbers: list[int], spans: list[tuple[int, int]]) -> list[int]:
        """Ids of pieces: 0 for text, n for the n-th added token; spans count characters of the text."""

class VocabularyBuilder:
    """A vocabulary's file, in the making; ValueError for parts that do not fit each other."""

    def __init__(self) -> None: ...
    def read_tokens(self, json: bytes) -> None: ...
    def read_merges(self, json: bytes) -> None: ...
    def add_tokens(self, spellings: list[str]) -> None:
        """Add all tokens of a model in the order of their ids."""

    def add_scored_merges(self, scores: Address, marks: Address) -> None:
        """Make every cut of a token into two a merge, where all three are marked.

        Args:
            scores: float64 of each token: merges come by falling scores of what they join, then by ids.
            marks: uint8 of each token.
        """

    def tokens_json(self) -> bytes: ...
    def merges_json(self) -> bytes: ...
    def add(self, id: int, spelling: str, flags: int) -> None: ...
    def find(self, spelling: str) -> int | None: ...
    def finish(self, options: int, unknown: int, notes: bytes) -> bytes: ...
    @property
    def num_tokens(self) -> int: ...
