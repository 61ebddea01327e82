"""The extension module that native/ builds: its names and types. Every Address is a Tensor.data_ptr()."""

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
    def pack(self, weights: Packed, start: int, source: Address, count: int, stride: int, element: int) -> None: ...
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
    ) -> None: ...
    def argmax(self, weights: Packed, x: Address, count: int, stride: int, ids: Address) -> None: ...
    def lookup(self, weights: Packed, ids: Address, count: int, out: Address) -> None: ...
    def rms_norm(
        self,
        x: Address,
        x_stride: int,
        update: Address,
        update_stride: int,
        weight: Address,
        eps: float,
        out: Address,
        count: int,
        size: int,
    ) -> None: ...
    def draw(
        self,
        logits: Address,
        stride: int,
        size: int,
        count: int,
        rows: Address,
        top_k: Address,
        temperature: Address,
        top_p: Address,
        min_p: Address,
        uniform: Address,
        ids: Address,
    ) -> None: ...
    def ban(self, logits: Address, stride: int, size: int, count: int, rows: Address, bits: Address) -> None: ...

class Packed:
    """The shape of a packed matrix and where its bytes are; see native/packed.h.

    Raises:
        ValueError: a shape without rows or inputs, or a gated one whose rows are not two halves.
    """

    def __init__(self, format: int, rows: int, depth: int, gated: bool) -> None: ...
    @property
    def num_bytes(self) -> int: ...
    def place(self, data: Address) -> None: ...

class PlannedStep:
    """How the attention of a step is cut into pieces."""

class LayerKV:
    """KV memory of one layer; scales are 0 for bf16."""

    def __init__(self, keys: Address, values: Address, key_scales: Address, value_scales: Address) -> None: ...

class HeadNorms:
    """Weights of the norms of q and k; 0 where the model has none."""

    def __init__(self, q: Address, k: Address, eps: float) -> None: ...

class Attention:
    """Attention of one model; see native/paged_attention.h."""

    def __init__(
        self, kernels: Kernels, heads: int, kv_heads: int, head_dim: int, page_size: int, scale: float
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
    ) -> PlannedStep: ...
    def forward(
        self, step: PlannedStep, memory: LayerKV, norms: HeadNorms, qkv: Address, out: Address, window: int
    ) -> None: ...

class Projection:
    """A packed matrix with its bias; 0: none. The matrix's bytes are placed by then."""

    def __init__(self, weights: Packed, bias: Address) -> None: ...

class DecoderLayer:
    """The weights and the KV memory of one dense layer; see native/decoder.h."""

    def __init__(
        self,
        attention_norm: Address,
        qkv: Projection,
        head_norms: HeadNorms,
        memory: LayerKV,
        window: int,
        output: Projection,
        mlp_norm: Address,
        gate_up: Projection,
        down: Projection,
    ) -> None: ...

class Decoder:
    """A dense decoder whose pass is one call."""

    def __init__(self, attention: Attention, embedding: Packed, final_norm: Address, eps: float) -> None: ...
    def add(self, layer: DecoderLayer) -> None: ...
    def scratch_numbers(self, tokens: int) -> int: ...
    def forward(
        self,
        step: PlannedStep,
        token_ids: Address,
        tokens: int,
        wanted: Address,
        outputs: int,
        scratch: Address,
        out: Address,
    ) -> None: ...

def available_isas() -> list[str]:
    """Levels that are built and that this machine runs, lowest first."""
