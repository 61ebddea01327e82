// Text of a model as nodes of the page. It is hostile input: no HTML is ever made of it. marked reads it into a tree, and
// each branch becomes nodes that hold text; HTML in it is shown as text, pictures become links that nobody follows unasked.
//
// A text that grows is not read anew with each of its pieces: all blocks but the last can no longer change.

import { Code } from "./code.js";
import { extensions, Formula } from "./formula.js";
import { t } from "./texts.js";
import { html, useEffect, useRef, useRedraw } from "./ui.js";

const { Marked, Lexer, Tokenizer } = globalThis.marked;

// marked reads what is in a quote, a list or an emphasis by a call within the call, and each level reads all of the rest:
// a text of thousands of them would end its stack or take minutes. What lies deeper than this stays text.
const MOST_NESTED = 8;
const NESTING = ["blockquote", "list", "emStrong", "del", "link", "reflink"];
let depth = 0;

const bounded = (name) => function read(...given) {
  if (depth === MOST_NESTED) return undefined;
  depth += 1;
  try {
    return Tokenizer.prototype[name].apply(this, given);
  } finally {
    depth -= 1;
  }
};

const marked = new Marked({ gfm: true, breaks: true, async: false }, { extensions },
  { tokenizer: Object.fromEntries(NESTING.map((name) => [name, bounded(name)])) });

// A long text is read in pieces, each a moment's work; the page can answer between them.
const PIECE = 2000;
// The items of a list longer than this no longer change, but the last.
const LONG_LIST = 2000;
// Reading and drawing takes at most this part of the time.
const SHARE = 6;

// Where the next piece of a text ends: at the end of a line, if one ends soon.
function pieceEnd(text, from) {
  if (text.length - from <= PIECE) return text.length;
  const end = text.indexOf("\n", from + PIECE) + 1;
  return end && end < from + 2 * PIECE ? end : from + PIECE;
}

class Reader {
  constructor() {
    this.clear();
  }

  clear() {
    Object.assign(this, { text: "", end: 0, blocks: [], tail: [], links: Object.create(null) });
  }

  // Takes in more of `text`; returns whether it has all of it.
  take(text, isOpen) {
    if (!text.startsWith(this.text)) this.clear();
    const from = Math.max(this.end, this.text.length);
    this.text = text.slice(0, pieceEnd(text, from));
    const hasAll = this.text.length === text.length;
    const source = this.text.slice(this.end);
    const tokens = this.#read(source);
    const last = hasAll && !isOpen ? tokens.length : tokens.findLastIndex(({ type }) => type !== "space");
    const kept = tokens.slice(0, Math.max(0, last));
    this.#commit(kept, tokens, source);
    return hasAll;
  }

  #read(source) {
    const lexer = new Lexer(marked.defaults);
    Object.assign(lexer.tokens.links, this.links);
    return lexer.lex(source);
  }

  // A link may be used before it is defined; of a definition that is not whole yet nothing is known.
  #define({ tag: name, href, title }) {
    if (Object.hasOwn(this.links, name)) return;
    this.links[name] = { href, title };
    for (const block of this.blocks) {
      if (!block.raw.toLowerCase().includes(`[${name}]`)) continue;
      const lexer = new Lexer(marked.defaults);
      Object.assign(lexer.tokens.links, this.links);
      Object.assign(block, { node: null, tokens: lexer.lex(block.raw) });
    }
  }

  #commit(kept, tokens, source) {
    const isWhole = tokens.reduce((sum, { raw }) => sum + raw.length, 0) === source.length;
    if (!isWhole) kept = [];
    for (const token of kept) {
      this.blocks.push({ raw: token.raw, tokens: [token], node: null });
      this.end += token.raw.length;
      if (token.type === "def") this.#define(token);
    }
    this.tail = tokens.slice(kept.length);
    const [list] = this.tail;
    if (isWhole && list?.type === "list" && list.raw.length > LONG_LIST && list.items.length > 1) this.#split(list);
  }

  #split(list) {
    const items = list.items.slice(0, -1);
    const raw = items.map((item) => item.raw).join("");
    if (!list.raw.startsWith(raw)) return;
    this.blocks.push({ raw, tokens: [{ ...list, raw, items }], node: null });
    this.end += raw.length;
    this.tail = this.#read(this.text.slice(this.end));
  }

  nodes() {
    for (const block of this.blocks) block.node ??= blocksOf(block.tokens);
    return [...this.blocks.map(({ node }) => node), blocksOf(this.tail, true)];
  }
}

// `isOpen`: more of it may come.
export function Markdown({ text, isOpen = false }) {
  const redraw = useRedraw();
  const state = useRef({ reader: new Reader(), nodes: [], shown: null, rest: 0, timer: 0 }).current;
  const clean = text.replaceAll(/\r\n?/g, "\n");
  const now = performance.now();
  const isLate = state.shown !== `${isOpen}${clean.length}` || !clean.startsWith(state.reader.text);
  if (isLate && (!isOpen || now >= state.rest)) { // an answer that is over is shown at once
    const hasAll = state.reader.take(clean, isOpen);
    state.nodes = state.reader.nodes();
    state.rest = performance.now() + (isOpen ? (performance.now() - now) * SHARE : 0);
    state.shown = hasAll ? `${isOpen}${clean.length}` : null;
  }
  useEffect(() => {
    if (state.shown === `${isOpen}${clean.length}`) return undefined;
    const timer = setTimeout(redraw, Math.max(0, state.rest - performance.now()));
    return () => clearTimeout(timer);
  });
  return html`<div class="markdown">${state.nodes}</div>`;
}

const blocksOf = (tokens, isOpen) => tokens.map((token, index) => blockOf(token, isOpen && index === tokens.length - 1));

function blockOf(token, isOpen) {
  const inside = () => linesOf(token.tokens ?? []);
  switch (token.type) {
    case "space": case "def": return null;
    case "heading": return html`<${`h${token.depth}`}>${inside()}<//>`;
    case "paragraph": return html`<p>${inside()}</p>`;
    case "text": return token.tokens ? inside() : plain(token);
    case "blockquote": return html`<blockquote>${blocksOf(token.tokens)}</blockquote>`;
    case "hr": return html`<hr />`;
    case "code": return html`<${Code} text=${token.text} language=${(token.lang || "").split(/\s/)[0]} isOpen=${isOpen} />`;
    case "list": return listOf(token);
    case "table": return tableOf(token);
    case "html": return html`<p>${token.text}</p>`;
    case "formula": return html`<p><${Formula} ...${token} /></p>`;
    default: return lineOf(token);
  }
}

function listOf({ ordered, start, items }) {
  const nodes = items.map((item) => html`<li>${blocksOf(item.tokens)}</li>`);
  return ordered ? html`<ol start=${start === 1 ? undefined : start}>${nodes}</ol>` : html`<ul>${nodes}</ul>`;
}

function tableOf({ header, rows }) {
  const cells = (row, name) => row.map(({ tokens, align }) => html`<${name} class=${align ? `to-${align}` : undefined}>${
    linesOf(tokens)}<//>`);
  return html`<div class="table" tabindex="0" role="region" aria-label=${t("table")}><table><thead><tr>${cells(header, "th")}</tr></thead>
    <tbody>${rows.map((row) => html`<tr>${cells(row, "td")}</tr>`)}</tbody></table></div>`;
}

const linesOf = (tokens) => tokens.map(lineOf);

function lineOf(token) {
  const inside = () => linesOf(token.tokens ?? []);
  switch (token.type) {
    case "strong": case "em": case "del": return html`<${token.type}>${inside()}<//>`;
    case "codespan": return html`<code>${token.text}</code>`;
    case "br": return html`<br />`;
    case "formula": return html`<${Formula} ...${token} />`;
    case "link": return linkOf(token.href, inside());
    case "image": return linkOf(token.href, plain({ text: token.text || token.href }));
    case "checkbox": return token.checked ? "☑ " : "☐ ";
    case "text": return token.tokens ? inside() : plain(token);
    case "paragraph": case "heading": case "list": case "blockquote": case "table": case "code": return blockOf(token);
    default: return token.text ?? token.raw;
  }
}

// Only what a browser opens as a page or a letter; all else stays text.
function linkOf(href, inside) {
  if (!/^(?:https?:|mailto:)/i.test(href)) return inside;
  return html`<a href=${href} target="_blank" rel="noopener noreferrer">${inside}</a>`;
}

const NAMES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", hellip: "…", mdash: "—", ndash: "–",
  copy: "©", times: "×", middot: "·", rarr: "→", larr: "←", deg: "°", le: "≤", ge: "≥", ne: "≠" };

// Text with references to characters as the characters, which HTML would otherwise do.
function plain({ text }) {
  if (!text.includes("&")) return text;
  return text.replaceAll(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{1,8}));/gi, (whole, tens, hex, name) => {
    if (name) return Object.hasOwn(NAMES, name) ? NAMES[name] : whole;
    const code = tens ? Number(tens) : parseInt(hex, 16);
    return code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code < 0xe000) ? String.fromCodePoint(code) : whole;
  });
}
