"""Read which layers have a window, or another kind of block, from config fields. Knows no torch."""

from __future__ import annotations

from tokenmill.model.models.config_reader import ConfigReader

Windows = tuple[int | None, ...]


def refuse_window(config: ConfigReader, num_layers: int, max_position: int) -> None:
    """Refuse a window in a family without windows, unless it is switched off or as long as a text can be.

    Such a config has no clear meaning: transformers 5 attends to all tokens of a prompt, and keeps only a window of
    them for those that follow.

    Raises:
        InvalidCheckpoint: `sliding_window` is shorter than a text, or `layer_types` has layers with one.
    """
    if config.raw("layer_types") is not None:
        read_kinds(config, num_layers, ("full_attention",))
    if config.raw("sliding_window") is None or config.raw("use_sliding_window") is False:
        return
    window = config.integer("sliding_window")
    if window < max_position:
        raise config.error(
            f"sliding_window {window} is not supported in this architecture, whose layers attend to all tokens; "
            "set it to null if the model was trained so"
        )


def one_window(config: ConfigReader, num_layers: int) -> Windows:
    """Return the same window for every layer."""
    return (read_window(config),) * num_layers


def read_window(config: ConfigReader, default: int = 4096) -> int | None:
    """Read the length of the window; None: the config has none."""
    # null means "no window"; absent means what transformers takes then.
    if not config.has("sliding_window"):
        return default
    return None if config.raw("sliding_window") is None else config.integer("sliding_window")


def layered_windows(config: ConfigReader, num_layers: int) -> Windows:
    """Read Qwen's windows: `layer_types` says which layers slide; older configs slide from `max_window_layers` on."""
    window = read_window(config) if config.boolean("use_sliding_window", False) else None
    if config.raw("layer_types") is None:
        first = config.integer("max_window_layers", 28, low=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return windows_by_type(config, num_layers, window)


def read_kinds(config: ConfigReader, num_layers: int, known: tuple[str, ...]) -> list[str]:
    """Return `layer_types`, the kind of each layer.

    Raises:
        InvalidCheckpoint: it is not a list of one name per layer, or has an unknown name.
    """
    layer_types = config.raw("layer_types")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise config.error(f"layer_types must be a list of {num_layers} names, one per layer")
    for kind in layer_types:
        if kind not in known:
            raise config.error(f"layer_types has {kind!r}; supported: {', '.join(known)}")
    return layer_types


def windows_by_type(config: ConfigReader, num_layers: int, window: int | None) -> Windows:
    """Read from `layer_types` which layers have the window.

    Raises:
        InvalidCheckpoint: layers have one whose length is unknown; see also `read_kinds`.
    """
    kinds = read_kinds(config, num_layers, ("full_attention", "sliding_attention"))
    if window is None and "sliding_attention" in kinds and config.raw("use_sliding_window") is not False:
        raise config.error("layer_types has sliding_attention, and nothing says how long its sliding_window is")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def windows_but_every_sixth(config: ConfigReader, num_layers: int) -> Windows:
    """Read Gemma 3's windows: from `layer_types`; older configs give the distance between full layers."""
    window = read_window(config)
    if config.raw("layer_types") is None:
        interval = config.integer("sliding_window_pattern", 6)
        return tuple(window if (layer + 1) % interval else None for layer in range(num_layers))
    return windows_by_type(config, num_layers, window)
