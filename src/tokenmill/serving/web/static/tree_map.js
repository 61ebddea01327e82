// The radix tree as a map: to the right goes the depth in tokens, downwards what hangs below a prefix. Fresh prefixes
// are strong, old ones pale; what requests hold has a frame. Click goes into a prefix, and how one begins is shown below.

import { getJson } from "./api.js";
import { begin, colours } from "./paint.js";
import { number, t } from "./texts.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const HEIGHT = 190;
const ROOT = -1;
const MOST = 1024; // the server sends no more
const MOST_LISTED = 40;
const READ_AFTER_MS = 150; // a pointer passes over many
const COLUMNS = ["tokens", "depth", "users", "age", "children"];

// `path`: of the route that shows how the prefix of a number begins.
export function TreeMap({ nodes, version, path }) {
  const canvas = useRef();
  const [top, setTop] = useState(ROOT);
  const [seen, see] = useState(null);
  const boxes = useRef([]);
  const root = nodes.some(([id]) => id === top) ? top : ROOT;
  useLayoutEffect(() => {
    boxes.current = layout(nodes, root);
    draw(canvas.current, boxes.current);
  }, [version, root, nodes]);
  const find = (event) => boxes.current.find(({ left, right, from, to }) => {
    const x = event.offsetX / canvas.current.clientWidth;
    const y = event.offsetY / HEIGHT;
    return left <= x && x < right && from <= y && y < to;
  });
  const text = useBeginning(seen?.id ?? root, path);
  const total = nodes.reduce((sum, [, , tokens]) => sum + tokens, 0);
  return html`<div><p class="hint">${t("tree.size", { count: nodes.length, tokens: number.format(total) })}${nodes.length >= MOST ? ` ${t("tree.first", { most: MOST })}` : ""}
      ${root !== ROOT && html`<button type="button" class="quiet" onClick=${() => setTop(ROOT)}>${t("tree.all")}</button>`}</p>
    <canvas ref=${canvas} role="img" aria-label=${t("tree.map")} onPointerMove=${(event) => see(find(event) ?? null)} onPointerLeave=${() => see(null)}
      onClick=${(event) => setTop(find(event)?.id ?? ROOT)}></canvas>
    <p class="hint">${seen ? t("tree.told", seen) : t("tree.hint")}</p>
    ${text && html`<pre class="prefix" aria-label=${t("tree.text")}>${text}…</pre>`}
    ${nodes.length > 0 && html`<${List} nodes=${nodes} root=${root} enter=${setTop} />`}</div>`;
}

// The text with which a prefix begins; null: there is none to show.
function useBeginning(id, path) {
  const [found, find] = useState({});
  useEffect(() => {
    if (id === ROOT) return undefined;
    const timer = setTimeout(() => getJson(path(id)).then(({ text }) => find({ id, text }), () => find({ id, text: null })), READ_AFTER_MS);
    return () => clearTimeout(timer);
  }, [id]);
  return id !== ROOT && found.id === id ? found.text : null;
}

// The largest prefixes as a table, for who does not see the map or has no mouse.
function List({ nodes, root, enter }) {
  const [isOpen, open] = useState(false);
  const largest = isOpen ? layout(nodes, root).sort((one, other) => other.tokens - one.tokens).slice(0, MOST_LISTED) : [];
  return html`<details onToggle=${(event) => open(event.target.open)}><summary>${t("tree.list")}</summary>
    ${isOpen && html`<div class="wide" tabindex="0" role="region" aria-label=${t("tree.title")}><table><thead><tr>
      ${COLUMNS.map((name) => html`<th key=${name} scope="col">${t(`tree.${name}`)}</th>`)}</tr></thead>
      <tbody>${largest.map((box) => html`<tr key=${box.id}><td><button type="button" class="quiet" onClick=${() => enter(box.id)}>
        ${number.format(box.tokens)}</button></td>${COLUMNS.slice(1).map((name) => html`<td key=${name}>${number.format(box[name])}</td>`)}</tr>`)}
      </tbody></table></div>`}</details>`;
}

// Boxes in parts of the canvas's width and height.
function layout(nodes, root) {
  const children = new Map([[ROOT, []]]);
  const byId = new Map();
  for (const [id, parent, tokens, users, age] of nodes) {
    const node = { id, parent, tokens, users, age, weight: tokens };
    byId.set(id, node);
    children.set(id, []);
    (children.get(parent) ?? children.get(ROOT)).push(node);
  }
  // Parents come before their children, so backwards each sum is whole when it is added.
  for (const [id] of [...nodes].reverse()) {
    const node = byId.get(id);
    if (byId.has(node.parent)) byId.get(node.parent).weight += node.weight;
  }
  const start = root === ROOT ? children.get(ROOT) : [byId.get(root)];
  const boxes = [];
  const work = [{ list: start, from: 0, to: 1, depth: 0 }];
  while (work.length) {
    const { list, from, to, depth } = work.pop();
    const whole = list.reduce((sum, node) => sum + node.weight, 0);
    let at = from;
    for (const node of [...list].sort((one, other) => other.weight - one.weight)) {
      const next = at + ((to - from) * node.weight) / whole;
      boxes.push({ ...node, depth, from: at, to: next, children: children.get(node.id).length });
      work.push({ list: children.get(node.id), from: at, to: next, depth: depth + node.tokens });
      at = next;
    }
  }
  const deepest = Math.max(1, ...boxes.map((box) => box.depth + box.tokens));
  for (const box of boxes) Object.assign(box, { left: box.depth / deepest, right: (box.depth + box.tokens) / deepest });
  return boxes;
}

function draw(canvas, boxes) {
  const { context, width } = begin(canvas, HEIGHT);
  const ink = colours("decode", "back", "text", "soft");
  context.fillStyle = ink.soft;
  context.fillRect(0, 0, width, HEIGHT);
  for (const { left, right, from, to, users, age } of boxes) {
    const box = [left * width, from * HEIGHT, Math.max(1, (right - left) * width - 1), Math.max(0.6, (to - from) * HEIGHT - 1)];
    context.globalAlpha = Math.max(0.18, 1 - Math.log10(1 + Math.max(0, age)) / 4);
    context.fillStyle = ink.decode;
    context.fillRect(...box);
    context.globalAlpha = 1;
    if (users && box[3] > 2) {
      context.strokeStyle = ink.text;
      context.strokeRect(...box);
    }
  }
}
