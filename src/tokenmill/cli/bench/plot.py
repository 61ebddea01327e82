"""`--plot FILE`: the figures of a benchmark as a picture, drawn by matplotlib where that is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill.cli.parser import Parser
from tokenmill.core.errors import InvalidConfig

# Lines with fewer points show each.
PLOT_MARKERS = 20


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one line and its name in the legend."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]


def add_plot_flag(parser: Parser) -> None:
    """Add `--plot FILE`."""
    parser.add_argument("--plot", metavar="FILE", help="draw the figures, e.g. out.png (needs matplotlib)")


def check_plot(path: str | None) -> None:
    """Refuse before anything is measured what could not be drawn after it.

    Raises:
        InvalidConfig: matplotlib is missing or does not know the format, or there is no such folder.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidConfig("--plot needs matplotlib: pip install 'tokenmill[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in formats:
        raise InvalidConfig(f"--plot: the name must end with one of {', '.join(sorted(formats))}, got {path!r}")
    if not Path(path).parent.is_dir():
        raise InvalidConfig(f"--plot: there is no folder {Path(path).parent}")


def draw(path: str | None, panels: Sequence[Panel]) -> None:
    """Write the picture; the name's ending says in which format."""
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0 * len(panels), 4.0), layout="constrained")
    for place, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for line in panel.lines:
            # A single point would not show as a line.
            place.plot(line.x, line.y, marker="." if len(line.x) < PLOT_MARKERS else "", label=line.name)
        place.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        place.set_ylim(bottom=0)
        place.grid(alpha=0.3)
        if len(panel.lines) > 1:
            place.legend()
    figure.savefig(path)
