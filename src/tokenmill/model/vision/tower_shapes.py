"""Name the weights of a vision tower, with their shapes. Knows no torch: sizes are known before anything is loaded."""

from __future__ import annotations

from tokenmill.model.vision.spec import AxialBlocks, VisionSpec

PATCHES, POSITIONS = "patch_embed.proj.weight", "pos_embed.weight"
# Of averages of patches; as offsets from 1.
POOLED_NORM = "merger.pooled_norm.weight"


AXIAL_PATCHES = "vision_tower.patch_embedder.input_proj.weight"
AXIAL_POSITIONS = "vision_tower.patch_embedder.position_embedding_table"
AXIAL_PROJECTION = "embed_vision.embedding_projection.weight"


def tower_shapes(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a tower, by Qwen3-VL's names; gate and up are one, `mlp.linear_fc1`."""
    if spec.axial is not None:
        return axial_shapes(spec, spec.axial)
    hidden, wide, middle = spec.hidden_size, spec.hidden_size * spec.merge**2, spec.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {}

    def add(name: str, *shape: int, has_bias: bool = True) -> None:
        shapes[f"{name}.weight"] = shape
        if has_bias:
            shapes[f"{name}.bias"] = shape[:1]

    frames = () if spec.is_pooled else (spec.frames,)
    patch = (hidden, 3, *frames, spec.patch_size, spec.patch_size)
    add("patch_embed.proj", *patch, has_bias=not spec.is_gated)
    if spec.table_side:
        shapes[POSITIONS] = (spec.table_side**2, hidden)
    for block in range(spec.depth):
        add(f"blocks.{block}.norm1", hidden, has_bias=not spec.is_gated)
        add(f"blocks.{block}.norm2", hidden, has_bias=not spec.is_gated)
        add(f"blocks.{block}.attn.qkv", 3 * hidden, hidden)
        add(f"blocks.{block}.attn.proj", hidden, hidden)
        add(f"blocks.{block}.mlp.linear_fc1", middle * (2 if spec.is_gated else 1), hidden)
        add(f"blocks.{block}.mlp.linear_fc2", hidden, middle)
    if spec.is_pooled:
        add("merger.norm", hidden)
        add("merger.linear", spec.out_size, hidden, has_bias=False)
        shapes[POOLED_NORM] = (hidden,)
        return shapes
    for name in ("merger", *(f"deepstack_merger_list.{i}" for i in range(len(spec.deepstack)))):
        add(f"{name}.norm", hidden if name == "merger" else wide, has_bias=not spec.is_gated)
        add(f"{name}.linear_fc1", wide, wide)
        add(f"{name}.linear_fc2", spec.out_size, wide)
    return shapes


def axial_shapes(spec: VisionSpec, axial: AxialBlocks) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of Gemma 4's tower, by the names in its checkpoints."""
    hidden, middle, tower = spec.hidden_size, spec.intermediate_size, "vision_tower"
    q_size, kv_size = spec.num_heads * axial.head_dim, axial.num_kv_heads * axial.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        AXIAL_PATCHES: (hidden, 3 * spec.patch_size**2),
        AXIAL_POSITIONS: (2, axial.num_positions, hidden),
        AXIAL_PROJECTION: (spec.out_size, hidden),
    }
    matrices = {f"self_attn.{part}_proj": (kv_size, hidden) for part in "kv"}
    matrices |= {"self_attn.q_proj": (q_size, hidden), "self_attn.o_proj": (hidden, q_size)}
    matrices |= {f"mlp.{part}_proj": (middle, hidden) for part in ("gate", "up")} | {"mlp.down_proj": (hidden, middle)}
    norms = {f"{side}_layernorm": hidden for side in ("input", "post_attention", "pre_feedforward", "post_feedforward")}
    norms |= {"self_attn.q_norm": axial.head_dim, "self_attn.k_norm": axial.head_dim}
    for block in range(spec.depth):
        for name, shape in matrices.items():
            shapes[f"{tower}.encoder.layers.{block}.{name}.linear.weight"] = shape
            for side in ("input", "output") if axial.clips else ():
                shapes |= {f"{tower}.encoder.layers.{block}.{name}.{side}_{end}": () for end in ("min", "max")}
        shapes |= {f"{tower}.encoder.layers.{block}.{name}.weight": (size,) for name, size in norms.items()}
    if axial.standardizes:
        shapes |= {f"{tower}.std_{part}": (hidden,) for part in ("bias", "scale")}
    return shapes
