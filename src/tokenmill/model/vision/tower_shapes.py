"""Name the weights of a vision tower, with their shapes. Knows no torch: sizes are known before anything is loaded."""

from __future__ import annotations

from tokenmill.model.vision.spec import VisionSpec

PATCHES, POSITIONS = "patch_embed.proj.weight", "pos_embed.weight"
# Of averages of patches; as offsets from 1.
POOLED_NORM = "merger.pooled_norm.weight"


def tower_shapes(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a tower, by Qwen3-VL's names; gate and up are one, `mlp.linear_fc1`."""
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
