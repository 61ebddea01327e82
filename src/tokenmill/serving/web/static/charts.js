// Small charts of numbers over time, drawn by uPlot.

import { colours } from "./paint.js";
import { number, t } from "./texts.js";
import { html, useEffect, useLayoutEffect, useRef } from "./ui.js";

const HEIGHT = 104;

// For each chart: its title, its unit, and the lines: a name, a colour and what to read.
const CHARTS = [
  { title: "chart.tokens", unit: "unit.tokens", lines: [["chart.output", "decode", (s) => s.outputRate],
    ["chart.prompt", "prefill", (s) => s.promptRate]] },
  { title: "chart.requests", unit: "unit.requests", lines: [["chart.running", "decode", (s) => s.running],
    ["chart.waiting", "commit", (s) => s.waiting]] },
  { title: "chart.pages", unit: "unit.pages", lines: [["pages.pinned", "decode", (s) => s.pinned],
    ["pages.evictable", "draft", (s) => s.evictable], ["pages.free", "faint", (s) => s.free]] },
  { title: "chart.hits", unit: "unit.percent", lines: [["chart.hits", "prefill", (s) => (s.hitShare === null ? null : 100 * s.hitShare)]] },
];
const POINTS = [
  { title: "chart.ttft", name: "ttft" },
  { title: "chart.gaps", name: "gaps" },
];

export function Charts({ view, version }) {
  const of = (read) => [view.samples.map((sample) => sample.at - view.now), ...read.map((one) => view.samples.map(one))];
  const points = (list) => [list.map(([at]) => at - view.now), list.map(([, value]) => value * 1000)];
  return html`<div class="charts">
    ${CHARTS.map(({ title, unit, lines }) => html`<${Chart} key=${title} title=${title} unit=${unit} version=${version} lines=${lines}
      data=${of(lines.map(([, , read]) => read))} />`)}
    ${POINTS.map(({ title, name }) => html`<${Chart} key=${title} title=${title} unit="unit.ms" version=${version}
      lines=${[[title, "schedule"]]} data=${points(view[name])} />`)}
  </div>`;
}

function Chart({ title, unit, lines, data, version }) {
  const place = useRef();
  const chart = useRef();
  const theme = document.documentElement.dataset.theme;
  useEffect(() => {
    const ink = colours("faint", "line", ...lines.map(([, name]) => name));
    const axis = { stroke: ink.faint, grid: { stroke: ink.line, width: 1 }, ticks: { show: false }, font: "10px system-ui",
      labelFont: "10px system-ui", labelSize: 14, labelGap: 0 };
    chart.current = new globalThis.uPlot({
      width: place.current.clientWidth, height: HEIGHT, legend: { show: false }, cursor: { y: false }, scales: { x: { time: false } },
      axes: [{ ...axis, size: 16, label: t("axis.seconds"), values: (_, ticks) => ticks.map((tick) => number.format(tick)) },
        { ...axis, size: 38, label: t(unit), values: (_, ticks) => ticks.map((tick) => number.format(tick)) }],
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
  const last = lines.map(([label, name], index) => html`<span class=${`ink-${name}`}>${lines.length > 1 ? `${t(label)} ` : ""}
    ${shown(data[index + 1].at(-1))}</span> `);
  return html`<figure><figcaption>${t(title)} ${last}</figcaption><div ref=${place}></div></figure>`;
}

function shown(value) {
  if (value === null || value === undefined) return "–";
  return number.format(value >= 100 ? Math.round(value) : value);
}
