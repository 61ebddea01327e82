"""The page pool, explained: who holds which page, what requests share, what may be evicted."""

from tools.drawing.svg import ACCENT, CACHED, DECODE, FREE, INK, PALE, PROMPT, Sheet

CELL, LEFT, POOL_TOP, COLUMNS = 44, 150, 250, 16
SHARED, OF_A, OF_B = [3, 7, 8], [12, 13], [5]
EVICTABLE = [18, 19, 24, 25, 26]
RESERVED = 0


def draw_page_pool() -> str:
    """The SVG: two requests with a common prompt, their rows of the page table, the pool and the radix tree."""
    sheet = Sheet(LEFT + CELL * COLUMNS + 30, 520, "The page pool: rows, pages and the radix tree")
    sheet.text(20, 30, "Two requests with the same system prompt, 16 tokens a page", 15)
    for number, (name, own, ink) in enumerate((("request A", OF_A, PROMPT), ("request B", OF_B, DECODE))):
        _row(sheet, 60 + 64 * number, name, own, ink)
    sheet.text(20, POOL_TOP - 30, "the pool")
    for page in range(2 * COLUMNS):
        x, y = _place(page)
        colour, words = _holder(page)
        sheet.box(x, y, CELL - 6, CELL - 6, colour, PALE, words)
        sheet.text(x + (CELL - 6) / 2, y + 24, str(page), 12, INK if colour == FREE else "#ffffff", "middle")
    sheet.legend(
        20,
        POOL_TOP + 2 * CELL + 26,
        [(CACHED, "shared by A and B"), (PROMPT, "A's"), (DECODE, "B's"), (PALE, "cached, evictable"), (FREE, "free")],
    )
    sheet.text(490, POOL_TOP + 2 * CELL + 26, "page 0 is reserved: padding is written there", 12, ACCENT)
    _tree(sheet, POOL_TOP + 2 * CELL + 66)
    return sheet.document()


def _place(page: int) -> tuple[float, float]:
    return LEFT + CELL * (page % COLUMNS), POOL_TOP - 12 + CELL * (page // COLUMNS)


def _holder(page: int) -> tuple[str, str]:
    if page == RESERVED:
        return ACCENT, "reserved"
    for pages, colour, words in (
        (SHARED, CACHED, "held by A and B, and by the tree"),
        (OF_A, PROMPT, "held by A"),
        (OF_B, DECODE, "held by B"),
        (EVICTABLE, PALE, "held by the tree alone: evicted when pages run out, the longest unused leaf first"),
    ):
        if page in pages:
            return colour, words
    return FREE, "free"


def _row(sheet: Sheet, y: float, name: str, own: list[int], ink: str) -> None:
    sheet.text(20, y + 24, f"{name}: its row")
    for place, page in enumerate([*SHARED, *own]):
        x = LEFT + CELL * 2.2 * place
        colour = CACHED if page in SHARED else ink
        sheet.box(x, y, CELL - 6, CELL - 6, colour, PALE)
        sheet.text(x + (CELL - 6) / 2, y + 24, str(page), 12, "#ffffff", "middle")
        sheet.text(x + CELL - 2, y + 23, f"{16 * place}-{16 * place + 15}", 10, PALE)
    x = LEFT + CELL * 2.2 * (len(SHARED) + len(own))
    sheet.text(x, y + 23, "grows by a page when a step needs one", 11, PALE)


def _tree(sheet: Sheet, y: float) -> None:
    """Edges hold whole pages of tokens; a node splits where two prompts differ first."""
    sheet.text(20, y + 18, "the radix tree")
    x = LEFT
    nodes = {
        "root": (x, y),
        "3 7 8": (x + 130, y),
        "12": (x + 300, y - 4),
        "5": (x + 300, y + 44),
        "18 19": (x + 130, y + 78),
        "24 25 26": (x + 250, y + 78),
    }
    for start, end in (("root", "3 7 8"), ("3 7 8", "12"), ("3 7 8", "5"), ("root", "18 19"), ("18 19", "24 25 26")):
        (x0, y0), (x1, y1) = nodes[start], nodes[end]
        sheet.line([(x0 + _width(start), y0 + 13), (x1, y1 + 13)], INK, arrow=True)
    colours = {"root": FREE, "3 7 8": CACHED, "12": PROMPT, "5": DECODE, "18 19": PALE, "24 25 26": PALE}
    for name, (x0, y0) in nodes.items():
        sheet.box(x0, y0, _width(name), 26, colours[name], PALE)
        sheet.text(x0 + _width(name) / 2, y0 + 18, name, 12, INK if name == "root" else "#ffffff", "middle")
    lines = (
        "A third request that begins alike gets pages 3, 7 and 8 before it",
        "runs: only the rest of its prompt is computed. Pages of running",
        "requests are locked. When A ends, page 12 stays in the tree,",
        "evictable; 13, which is not full, is free at once.",
        "free + evictable + held is always the whole pool.",
    )
    for number, words in enumerate(lines):
        sheet.text(LEFT + 370, y + 12 + 18 * number, words, 11)


def _width(name: str) -> float:
    return 24.0 + 9 * len(name)
