"""The way of a request through the processes."""

from dataclasses import dataclass

from tools.drawing.svg import ACCENT, CACHED, DECODE, FREE, INK, PALE, PROMPT, Sheet


@dataclass(frozen=True)
class Stop:
    """A thing that happens to a request, and where."""

    x: float
    y: float
    words: str
    detail: str
    colour: str


HEIGHT, WIDTH = 50, 172
PROCESSES = (
    (20, 212, "API process", "no torch"),
    (252, 212, "text worker", "one or more"),
    (484, 424, "engine process", "the only one with the model"),
)
API_IN = Stop(40, 80, "checks the body, once", "4xx, or accepted", PROMPT)
ENCODE = Stop(272, 80, "template, tokenizer", "text to token ids", PROMPT)
QUEUE = Stop(504, 80, "queue", "waits with a reason", DECODE)
SCHEDULE = Stop(712, 80, "schedule", "a StepPlan under a budget", DECODE)
RUN = Stop(712, 190, "run", "model, then sampler", ACCENT)
COMMIT = Stop(504, 190, "commit", "tokens, finish reasons", DECODE)
PAGES = Stop(608, 310, "radix tree, page pool", "whose KV is where", CACHED)
DECODE_TEXT = Stop(272, 190, "detokenizer, stop strings", "token ids to text", PROMPT)
API_OUT = Stop(40, 190, "SSE chunks or JSON", "one terminal reply each", PROMPT)
STOPS = (API_IN, ENCODE, QUEUE, SCHEDULE, RUN, COMMIT, PAGES, DECODE_TEXT, API_OUT)


def draw_request() -> str:
    """The SVG."""
    sheet = Sheet(930, 400, "The way of a request")
    for x, width, name, remark in PROCESSES:
        sheet.box(x, 20, width, 360 if width > 300 else 240, FREE, PALE)
        sheet.text(x + 12, 42, name, 14)
        sheet.text(x + width - 12, 42, remark, 11, PALE, "end")
    for stop in STOPS:
        sheet.box(stop.x, stop.y, WIDTH, HEIGHT, stop.colour)
        sheet.text(stop.x + WIDTH / 2, stop.y + 21, stop.words, 13, "#ffffff", "middle")
        sheet.text(stop.x + WIDTH / 2, stop.y + 39, stop.detail, 11, "#ffffff", "middle")
    for start, end in ((API_IN, ENCODE), (ENCODE, QUEUE), (QUEUE, SCHEDULE)):
        _across(sheet, start, end)
    _down(sheet, SCHEDULE, RUN)
    for start, end in ((RUN, COMMIT), (COMMIT, DECODE_TEXT), (DECODE_TEXT, API_OUT)):
        _across(sheet, start, end)
    sheet.line([(COMMIT.x + 60, COMMIT.y), (COMMIT.x + 60, QUEUE.y + HEIGHT)], INK, arrow=True)
    sheet.text(COMMIT.x + 68, 165, "not finished: the next step", 11)
    for x in (650, 738):
        sheet.line([(x, 240), (x, 310)], PALE, "3 3", arrow=True)
    sheet.text(694, 374, "taken when a step is planned, given back when it is committed", 11, INK, "middle")
    sheet.text(20, 290, "Between processes: msgspec structs over unix sockets in a private folder.", 11)
    sheet.text(20, 308, "There is no prefill phase and no decode phase: each step runs whatever", 11)
    sheet.text(20, 326, "tokens its requests still lack, up to the budget.", 11)
    return sheet.document()


def _across(sheet: Sheet, start: Stop, end: Stop) -> None:
    middle = start.y + HEIGHT / 2
    points = (
        [(start.x + WIDTH, middle), (end.x, middle)]
        if start.x < end.x
        else [(start.x, middle), (end.x + WIDTH, middle)]
    )
    sheet.line(points, INK, arrow=True)


def _down(sheet: Sheet, start: Stop, end: Stop) -> None:
    middle = start.x + WIDTH / 2
    sheet.line([(middle, start.y + HEIGHT), (middle, end.y)], INK, arrow=True)
