"""`--plot FILE`: draw the figures of a benchmark with matplotlib, if that is installed."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from tokenmill.core.errors import InvalidConfig
from tokenmill.core.whole_file import whole_file

# Lines with fewer points show each.
PLOT_MARKERS = 20
PANEL_INCHES = 6.0
# As many of the title's letters fit.
LETTERS_PER_INCH = 14


class Line(msgspec.Struct, frozen=True):
    """The points of one line and its name in the legend; with `low` and `high`, the band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()


class Panel(msgspec.Struct, frozen=True):
    """One pair of axes; `marks` are places on the x axis, by the name in the legend."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    marks: Mapping[str, float] = msgspec.field(default_factory=dict)


def check_plot(path: str | None) -> None:
    """Refuse a picture that could not be drawn, before anything is measured.

    Raises:
        InvalidConfig: matplotlib is missing or does not know the format.
    """
    if path is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidConfig("--plot needs matplotlib: pip install 'tokenmill[plot]'")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix.removeprefix(".") not in formats:
        raise InvalidConfig(f"--plot: the name must end with one of {', '.join(sorted(formats))}, got {path!r}")


def draw(path: str, panels: Sequence[Panel], title: str = "") -> None:
    """Write the picture, with the title above all panels; the name's ending selects the format.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    inches = PANEL_INCHES * len(panels)
    figure = Figure(figsize=(inches, 4.0), layout="constrained")
    width = int(inches * LETTERS_PER_INCH)
    figure.suptitle("\n".join(textwrap.fill(line, width) for line in title.splitlines()), fontsize=10)
    for place, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for line in panel.lines:
            # A single point would not show as a line.
            place.plot(line.x, line.y, marker="." if len(line.x) < PLOT_MARKERS else "", label=line.name)
            if line.high:
                place.fill_between(line.x, line.low, line.high, alpha=0.2)
        for number, (name, x) in enumerate(panel.marks.items(), 1):
            place.axvline(x, color=f"C{number}", linestyle="--", linewidth=1, label=name)
        place.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        place.set_ylim(bottom=0)
        place.grid(alpha=0.3)
        if len(panel.lines) > 1 or panel.marks:
            place.legend()
    with whole_file(Path(path)) as file:
        figure.savefig(file, format=Path(path).suffix.removeprefix("."))
