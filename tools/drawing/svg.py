"""A sheet to draw on: rectangles, lines and texts in pixels, as one SVG document."""

from html import escape

INK, PALE, PAPER = "#1f2933", "#9aa5b1", "#ffffff"
PROMPT, DECODE, CACHED, FREE, ACCENT = "#3e7cb1", "#e08e45", "#81b29a", "#eef1f4", "#b23a48"
FONT = "font-family='Helvetica, Arial, sans-serif'"


class Sheet:
    """A drawing so far; later things cover earlier ones."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self._head = (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:g} {height:g}' "
            f"width='{width:g}' height='{height:g}' role='img'>\n<title>{escape(title)}</title>"
        )
        self._parts: list[str] = []
        self.box(0, 0, width, height, PAPER)

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, edge: str = "none", hint: str = ""
    ) -> None:
        """A rectangle; `hint` is shown where the mouse rests."""
        inside = f"<title>{escape(hint)}</title>" if hint else ""
        self._parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}' rx='2' fill='{fill}' stroke='{edge}'>"
            f"{inside}</rect>"
        )

    def line(self, points: list[tuple[float, float]], ink: str = INK, dashes: str = "", arrow: bool = False) -> None:
        """A line through points, with a head at its end if it is an arrow."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        dash = f" stroke-dasharray='{dashes}'" if dashes else ""
        self._parts.append(f"<polyline points='{path}' fill='none' stroke='{ink}' stroke-width='1.4'{dash}/>")
        if arrow:
            self._head_of_arrow(points[-2], points[-1], ink)

    def text(self, x: float, y: float, words: str, size: float = 12, ink: str = INK, place: str = "start") -> None:
        """One line of text whose baseline is at y; `place`: start, middle or end."""
        how = f"font-size='{size:g}' fill='{ink}' text-anchor='{place}' {FONT}"
        self._parts.append(f"<text x='{x:g}' y='{y:g}' {how}>{escape(words)}</text>")

    def legend(self, x: float, y: float, items: list[tuple[str, str]]) -> None:
        """Colours and what they mean, side by side."""
        for colour, words in items:
            self.box(x, y - 10, 12, 12, colour, PALE if colour in (FREE, PAPER) else "none")
            self.text(x + 17, y, words)
            x += 30 + 6.4 * len(words)

    def document(self) -> str:
        """The SVG."""
        return "\n".join([self._head, *self._parts, "</svg>"]) + "\n"

    def _head_of_arrow(self, before: tuple[float, float], end: tuple[float, float], ink: str) -> None:
        (x0, y0), (x, y) = before, end
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5 or 1.0
        dx, dy = (x - x0) / length, (y - y0) / length
        corners = [
            (x, y),
            (x - 7 * dx + 3.5 * dy, y - 7 * dy - 3.5 * dx),
            (x - 7 * dx - 3.5 * dy, y - 7 * dy + 3.5 * dx),
        ]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        self._parts.append(f"<polygon points='{path}' fill='{ink}'/>")
