"""A step log as a picture: a column for each step, a lane for each request, the budget below."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tools.drawing.svg import ACCENT, CACHED, DECODE, INK, PALE, PROMPT, Sheet

from tokenmill.engine.loop.step_log import Added, StepRecord, read_log

LEFT, TOP, LANE, BAR = 92, 58, 26, 90


@dataclass
class Lane:
    """One request.

    Attributes:
        arrived: the step before which it came.
        cells: (step, tokens of its prompt, tokens that it had sampled) of each step that ran it.
        cached: prompt tokens that the prefix cache supplied at its first step.
        num_prompt_tokens: of its own prompt.
    """

    arrived: int
    num_prompt_tokens: int
    cached: int = 0
    cells: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Timeline:
    """Lanes in the order of arrival, and the token budget of a step."""

    lanes: dict[str, Lane]
    budget: int
    num_steps: int


def read_timeline(path: Path) -> Timeline:
    """Return what each step of a log ran.

    Raises:
        TokenMillError: it is no step log of this version.
    """
    header, records = read_log(path)
    timeline = Timeline({}, header.scheduler.max_num_batched_tokens, 0)
    for record in records:
        _take(timeline, record)
    return timeline


def _take(timeline: Timeline, record: StepRecord) -> None:
    for arrived in record.inputs:
        if isinstance(arrived, Added):
            message = arrived.message
            timeline.lanes[message.id] = Lane(timeline.num_steps + 1, len(message.prompt_token_ids))
    if record.plan is None:
        return
    timeline.num_steps = step = record.plan["step"]
    rows = zip(record.plan["request_ids"], record.plan["num_computed"], record.plan["num_scheduled"], strict=True)
    for request_id, computed, scheduled in rows:
        lane = timeline.lanes[request_id]
        if not lane.cells:
            lane.cached = computed
        of_prompt = max(0, min(lane.num_prompt_tokens - computed, scheduled))
        lane.cells.append((step, of_prompt, scheduled - of_prompt))


def draw_timeline(timeline: Timeline) -> str:
    """The SVG: prompts and decodes in one step, who waits, and how full each step is."""
    column = max(8.0, min(26.0, 900 / max(1, timeline.num_steps)))
    width = LEFT + column * timeline.num_steps + 24
    bottom = TOP + LANE * len(timeline.lanes)
    sheet = Sheet(width, bottom + BAR + 66, "A timeline of mixed steps")
    sheet.legend(
        LEFT, 24, [(PROMPT, "prompt tokens"), (DECODE, "a decoded token"), (CACHED, "prompt found in the prefix cache")]
    )
    sheet.text(LEFT, 44, "dotted: has arrived and waits; a number: tokens of the prompt that this step ran", 11, PALE)
    for number, lane in enumerate(timeline.lanes.values()):
        _draw_lane(sheet, lane, number, TOP + LANE * number, column)
    _draw_budget(sheet, timeline, bottom + 16, column)
    return sheet.document()


def _draw_lane(sheet: Sheet, lane: Lane, number: int, y: float, column: float) -> None:
    sheet.text(LEFT - 8, y + 16, f"request {number + 1}", 12, INK, "end")
    last = lane.arrived - 1
    for step, of_prompt, decoded in lane.cells:
        x = LEFT + column * (step - 1)
        if step > last + 1:
            sheet.line([(LEFT + column * last, y + 12), (x, y + 12)], PALE, "2 3")
        last = step
        hint = f"step {step}: {of_prompt} tokens of the prompt, {decoded} decoded"
        sheet.box(x + 1, y + 3, column - 2, LANE - 7, PROMPT if of_prompt else DECODE, hint=hint)
        if of_prompt and column >= 16:
            sheet.text(x + column / 2, y + 16, str(of_prompt), 10, "#ffffff", "middle")
    if lane.cached:
        x = LEFT + column * (lane.cells[0][0] - 1)
        sheet.box(x + 1, y + LANE - 7, column - 2, 4, CACHED, hint=f"{lane.cached} tokens of the prompt were cached")


def _draw_budget(sheet: Sheet, timeline: Timeline, y: float, column: float) -> None:
    """Stacked bars: tokens of prompts at the bottom, decoded ones on top, against the budget."""
    scale = BAR / timeline.budget
    right = LEFT + column * timeline.num_steps
    for step in range(1, timeline.num_steps + 1):
        cells = [cell for lane in timeline.lanes.values() for cell in lane.cells if cell[0] == step]
        base, x = y + BAR, LEFT + column * (step - 1)
        for colour, tokens in ((PROMPT, sum(cell[1] for cell in cells)), (DECODE, sum(cell[2] for cell in cells))):
            if tokens:
                sheet.box(
                    x + 1, base - tokens * scale, column - 2, tokens * scale, colour, hint=f"step {step}: {tokens}"
                )
                base -= tokens * scale
    sheet.line([(LEFT, y), (right, y)], ACCENT, "4 3")
    sheet.text(LEFT - 8, y + 4, f"{timeline.budget} tokens", 11, ACCENT, "end")
    sheet.text(LEFT - 8, y + BAR, "0", 11, INK, "end")
    sheet.line([(LEFT, y + BAR), (right, y + BAR)], INK)
    for step in range(1, timeline.num_steps + 1):
        if step == 1 or step % 5 == 0:
            sheet.text(LEFT + column * (step - 0.5), y + BAR + 16, str(step), 10, INK, "middle")
    sheet.text(LEFT + (right - LEFT) / 2, y + BAR + 36, "step", 12, INK, "middle")
