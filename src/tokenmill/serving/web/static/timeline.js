// The timeline of one engine: steps as wide as their seconds, their tokens stacked, below them how their time was split,
// below that a lane for each row. Drag to move, wheel or + and - to zoom, click on what is of interest.

import { seconds } from "./engine_view.js";
import { begin, colours } from "./paint.js";
import { number, t } from "./texts.js";
import { html, useLayoutEffect, useRef, useState } from "./ui.js";

const TOKENS = 96; // heights in pixels
const SPLIT = 14;
const AXIS = 18;
const LANES_AT = TOKENS + SPLIT + AXIS + 6;
const SHORTEST = 0.02; // of the time that is shown, in seconds
const LONGEST = 600;

const PARTS = ["schedule", "run", "commit"];
const MARKS = { preempted: "commit", abort: "bad", error: "bad" };

export function Timeline({ view, version, window: shown, setWindow, chosen, choose }) {
  const canvas = useRef();
  const [hint, setHint] = useState("");
  const drag = useRef(null);
  const end = shown.end ?? view.now;
  const start = end - shown.length;
  const numRows = 1 + view.spans.reduce((most, span) => Math.max(most, span.to < start ? -1 : span.row), 3);
  const lane = Math.max(4, Math.min(14, 360 / numRows));
  const height = LANES_AT + numRows * lane;
  useLayoutEffect(() => draw(canvas.current, view, { start, end, lane, height, chosen }),
    [version, start, end, chosen, height]);

  const timeAt = (x) => start + (x / canvas.current.clientWidth) * shown.length;
  const zoom = (factor, at = end) => {
    const length = Math.min(LONGEST, Math.max(SHORTEST, shown.length * factor));
    const moved = at + (end - at) * (length / shown.length);
    setWindow({ length, end: shown.end === null && at === end ? null : moved });
  };
  const shift = (by) => setWindow({ length: shown.length, end: Math.min(view.now, end + by) });
  const find = (event) => {
    const at = timeAt(event.offsetX);
    if (event.offsetY < LANES_AT) return { turn: view.turns.find((turn) => turn.at <= at && at < turn.end && turn.step) };
    const row = Math.floor((event.offsetY - LANES_AT) / lane);
    return { span: view.spans.findLast((span) => span.row === row && span.from <= at && at <= span.to) };
  };
  const onMove = (event) => {
    if (drag.current) {
      const moved = ((drag.current.x - event.clientX) / canvas.current.clientWidth) * shown.length;
      if (Math.abs(drag.current.x - event.clientX) > 3) drag.current.moved = true;
      if (drag.current.moved) setWindow({ length: shown.length, end: Math.min(view.now, drag.current.end + moved) });
      return;
    }
    const { turn, span } = find(event);
    setHint(turn ? told(turn) : span ? t("timeline.span", { row: span.row, id: span.id, end: span.end ? t(`end.${span.end}`) : "" }) : "");
  };
  const onUp = (event) => {
    if (drag.current && !drag.current.moved) choose(find(event));
    drag.current = null;
  };
  const onKey = (event) => {
    const act = { "+": () => zoom(0.7), "-": () => zoom(1.4), ArrowLeft: () => shift(-shown.length / 5),
      ArrowRight: () => shift(shown.length / 5), End: () => setWindow({ length: shown.length, end: null }) }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };
  const onWheel = (event) => {
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.2 : 1 / 1.2, timeAt(event.offsetX));
  };
  return html`<div class="timeline">
    <canvas ref=${canvas} tabindex="0" role="img" aria-label=${t("timeline.label", { index: view.index })}
      onPointerDown=${(event) => { drag.current = { x: event.clientX, end, moved: false }; }} onPointerMove=${onMove}
      onPointerUp=${onUp} onPointerLeave=${() => { drag.current = null; setHint(""); }} onWheel=${onWheel} onKeyDown=${onKey}>
    </canvas>
    <p class="hint" aria-live="off">${hint || t("timeline.hint")}</p></div>`;
}

export function told(turn) {
  const split = PARTS.map((part) => `${t(`part.${part}`)} ${seconds(turn[part])}`).join(", ");
  const tokens = ["decode", "prefill", "draft"].filter((kind) => turn[kind])
    .map((kind) => `${number.format(turn[kind])} ${t(`tokens.${kind}`)}`).join(", ");
  const more = [turn.waiting && t("timeline.first", { reason: turn.waiting }), turn.error].filter(Boolean);
  return [t("timeline.step", { step: turn.step, requests: turn.requests, tokens, split }), ...more].join("; ");
}

function draw(canvas, view, { start, end, lane, height, chosen }) {
  const { context, width } = begin(canvas, height);
  const ink = colours("decode", "prefill", "draft", "schedule", "run", "commit", "line", "faint", "bad", "soft", "text", "back");
  const x = (at) => ((at - start) / (end - start)) * width;
  drawAxis(context, { start, end, width, height, x, ink });
  const seen = view.turns.filter((turn) => turn.step && turn.end >= start && turn.at <= end);
  const most = Math.max(8, ...seen.map((turn) => turn.decode + turn.prefill + turn.draft));
  for (const turn of seen) {
    const left = x(turn.at);
    const wide = Math.max(1, x(turn.end) - left - 0.5);
    let bottom = TOKENS;
    for (const kind of ["decode", "prefill", "draft"]) {
      const tall = (turn[kind] / most) * (TOKENS - 12);
      context.fillStyle = ink[kind];
      context.fillRect(left, bottom - tall, wide, tall);
      bottom -= tall;
    }
    let from = turn.at;
    for (const part of PARTS) {
      context.fillStyle = part === "run" ? ink.faint : ink[part];
      context.fillRect(x(from), TOKENS + 3, Math.max(0.5, x(from + turn[part]) - x(from)), SPLIT);
      from += turn[part];
    }
    if (turn.error) {
      context.fillStyle = ink.bad;
      context.fillRect(left, 0, Math.max(2, wide), TOKENS);
    }
  }
  context.fillStyle = ink.faint;
  context.fillText(t("timeline.most", { count: number.format(most) }), 2, 10);
  drawLanes(context, view, { start, end, lane, height, x, ink, chosen });
}

function drawAxis(context, { start, end, width, height, x, ink }) {
  const least = (90 / width) * (end - start); // seconds between two lines, so that what is written has room
  const decade = 10 ** Math.floor(Math.log10(least));
  const step = decade * [1, 2, 5, 10].find((factor) => factor * decade >= least);
  context.strokeStyle = context.fillStyle = ink.line;
  context.lineWidth = 1;
  const room = context.measureText(t("timeline.axis")).width + 12;
  for (let at = Math.ceil(start / step) * step; at < end; at += step) {
    context.beginPath();
    context.moveTo(Math.round(x(at)) + 0.5, 0);
    context.lineTo(Math.round(x(at)) + 0.5, height);
    context.stroke();
    context.fillStyle = ink.faint;
    const text = `-${seconds(Math.max(0, end - at))}`;
    if (x(at) + 3 + context.measureText(text).width < width - room) context.fillText(text, x(at) + 3, TOKENS + SPLIT + AXIS);
  }
  context.fillRect(0, TOKENS, width, 1);
  context.textAlign = "right";
  context.fillText(t("timeline.axis"), width - 4, TOKENS + SPLIT + AXIS);
  context.textAlign = "left";
}

function drawLanes(context, view, { start, end, lane, height, x, ink, chosen }) {
  // What was before the first step that is kept is not known, but for those who had rows since then.
  if (x(view.horizon) > 0) {
    context.fillStyle = ink.soft;
    context.fillRect(0, 0, Math.min(x(view.horizon), x(end)), height);
  }
  for (const span of view.spans) {
    if (span.to < start || span.from > end) continue;
    const top = LANES_AT + span.row * lane;
    const left = Math.max(0, x(span.from));
    const right = x(Math.min(span.to, end));
    const first = view.lives.get(span.id)?.first;
    const turns = first && first > span.from ? Math.min(right, Math.max(left, x(first))) : first ? left : right;
    context.fillStyle = ink.prefill;
    context.fillRect(left, top, Math.max(1, turns - left), lane - 1);
    context.fillStyle = ink.decode;
    context.fillRect(turns, top, Math.max(0, right - turns), lane - 1);
    if (span.id === chosen) {
      context.strokeStyle = ink.text;
      context.lineWidth = 2;
      context.strokeRect(left, top, Math.max(2, right - left), lane - 1);
    }
    if (MARKS[span.end]) {
      context.fillStyle = ink[MARKS[span.end]];
      context.fillRect(right - 3, top, 3, lane - 1);
    }
  }
  const each = Math.ceil(10 / lane); // rows between two numbers
  for (let row = 0; LANES_AT + row * lane < height; row += each) {
    const text = row ? String(row) : t("timeline.row", { row });
    context.fillStyle = ink.back;
    context.fillRect(0, LANES_AT + row * lane, context.measureText(text).width + 5, Math.min(lane, 11));
    context.fillStyle = ink.text;
    context.fillText(text, 2, LANES_AT + row * lane + Math.min(lane, 11) - 1);
  }
}
