"""Names and shapes of the weights of an encoder of sound and of its projection, as checkpoints have them."""

from __future__ import annotations

from tokenmill.model.audio.spec import AudioSpec

PROJECTOR = "multi_modal_projector."


def encoder_shapes(spec: AudioSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by its name."""
    size = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "conv1.weight": (size, spec.num_bins, 3),
        "conv1.bias": (size,),
        "conv2.weight": (size, size, 3),
        "conv2.bias": (size,),
        "embed_positions.weight": (spec.max_positions, size),
        "layer_norm.weight": (size,),
        "layer_norm.bias": (size,),
    }
    for layer in range(spec.depth):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(spec).items()}
    named = {spec.tower + name: shape for name, shape in shapes.items()}
    if spec.is_whole:
        return named
    projector = {"linear.weight": (spec.out_size, size), "linear.bias": (spec.out_size,)}
    return named | {PROJECTOR + name: shape for name, shape in projector.items()}


def _layer_shapes(spec: AudioSpec) -> dict[str, tuple[int, ...]]:
    size, middle = spec.hidden_size, spec.intermediate_size
    linears = {f"self_attn.{name}_proj": (size, size) for name in ("q", "k", "v", "out")}
    linears |= {"fc1": (middle, size), "fc2": (size, middle)}
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
    # Keys have no bias: it would add the same to all that a query sees.
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linears.items() if name != "self_attn.k_proj"}
    for norm in ("self_attn_layer_norm", "final_layer_norm"):
        shapes |= {f"{norm}.weight": (size,), f"{norm}.bias": (size,)}
    return shapes
