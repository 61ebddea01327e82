// Small charts of numbers over time, drawn by uPlot.

import { colours } from "./paint.js";
import { html, useEffect, useLayoutEffect, useRef } from "./ui.js";

const HEIGHT = 92;

// For each chart: its title, how its values are written, and the lines: a name, a colour and what to read.
const CHARTS = [
  { title: "Tokens a second", lines: [["output", "decode", (s) => s.tokens], ["prompt", "prefill", (s) => s.prompts]] },
  { title: "Requests", lines: [["running", "decode", (s) => s.stats.num_running], ["waiting", "commit", (s) => s.stats.num_waiting]] },
  { title: "Pages", lines: [["pinned", "decode", (s) => s.stats.num_pages_pinned],
    ["evictable", "draft", (s) => s.stats.num_pages_evictable], ["free", "faint", (s) => s.free]] },
  { title: "Prefix hits, %", lines: [["hits", "prefill", (s) => (s.hits === null ? null : 100 * s.hits)]] },
];
const POINTS = [
  { title: "Time to first token, ms", name: "ttft" },
  { title: "Gaps between tokens, ms", name: "gaps" },
];

export function Charts({ view, version }) {
  const of = (read) => [view.samples.map((sample) => sample.at - view.now), ...read.map((one) => view.samples.map(one))];
  const points = (list) => [list.map(([at]) => at - view.now), list.map(([, value]) => value * 1000)];
  return html`<div class="charts">
    ${CHARTS.map(({ title, lines }) => html`<${Chart} key=${title} title=${title} version=${version} lines=${lines}
      data=${of(lines.map(([, , read]) => read))} />`)}
    ${POINTS.map(({ title, name }) => html`<${Chart} key=${title} title=${title} version=${version}
      lines=${[[name, "schedule"]]} data=${points(view[name])} />`)}
  </div>`;
}

function Chart({ title, lines, data, version }) {
  const place = useRef();
  const chart = useRef();
  const theme = document.documentElement.dataset.theme;
  useEffect(() => {
    const ink = colours("faint", "line", ...lines.map(([, name]) => name));
    const axis = { stroke: ink.faint, grid: { stroke: ink.line, width: 1 }, ticks: { show: false }, font: "10px system-ui" };
    chart.current = new globalThis.uPlot({
      width: place.current.clientWidth, height: HEIGHT, legend: { show: false }, cursor: { y: false }, scales: { x: { time: false } },
      axes: [{ ...axis, size: 18, values: (_, ticks) => ticks.map((tick) => `${tick} s`) }, { ...axis, size: 42 }],
      series: [{}, ...lines.map(([label, name]) => ({ label, stroke: ink[name], width: 1.4, points: { show: false } }))],
    }, data, place.current);
    const watch = new ResizeObserver(() => chart.current.setSize({ width: place.current.clientWidth, height: HEIGHT }));
    watch.observe(place.current);
    return () => {
      watch.disconnect();
      chart.current.destroy();
    };
  }, [theme]);
  useLayoutEffect(() => chart.current?.setData(data), [version]);
  const last = lines.map(([label, name], index) => html`<span class=${`ink-${name}`}>${lines.length > 1 ? `${label} ` : ""}
    ${shown(data[index + 1].at(-1))}</span> `);
  return html`<figure><figcaption>${title} ${last}</figcaption><div ref=${place}></div></figure>`;
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}
