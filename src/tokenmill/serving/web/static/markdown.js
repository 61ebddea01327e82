// Text of a model as nodes of the page. It is hostile input: HTML in it is shown as text, pictures become links that
// nobody follows unasked, and what marked makes of the rest passes DOMPurify with a short list of tags.

import { html, useLayoutEffect, useRef } from "./ui.js";

const { Marked, Tokenizer } = globalThis.marked;
const purify = globalThis.DOMPurify;

const ALLOWED = {
  ALLOWED_TAGS: ["a", "p", "br", "hr", "em", "strong", "del", "code", "pre", "blockquote", "ul", "ol", "li",
    "h1", "h2", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td", "span"],
  ALLOWED_ATTR: ["href", "start", "align", "data-language"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};

const escape = (text) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);

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

const reader = new Marked({ gfm: true, breaks: true, async: false }, {
  tokenizer: Object.fromEntries(NESTING.map((name) => [name, bounded(name)])),
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    code: ({ text, lang }) => `<pre data-language="${escape((lang || "").split(" ")[0])}"><code>${escape(text)}</code></pre>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

export function nodesOf(text) {
  const fragment = purify.sanitize(reader.parse(text), ALLOWED);
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const block of fragment.querySelectorAll("pre")) decorate(block);
  return fragment;
}

// A bar over a block of code: its language, and a button that copies it.
function decorate(block) {
  const bar = document.createElement("div");
  const button = document.createElement("button");
  const name = document.createElement("span");
  bar.className = "code-bar";
  name.textContent = block.dataset.language || "text";
  button.type = "button";
  button.className = "quiet";
  button.textContent = "Copy";
  bar.append(name, button);
  const frame = document.createElement("div");
  frame.className = "code";
  block.replaceWith(frame);
  block.tabIndex = 0;
  frame.append(bar, block);
}

// One listener for all buttons: those of a streamed text are made anew with each of its parts.
async function copyCode(event) {
  const button = event.target.closest(".code-bar button");
  if (!button) return;
  await navigator.clipboard.writeText(button.closest(".code").querySelector("pre").textContent);
  button.textContent = "Copied";
}

export function Markdown({ text }) {
  const place = useRef();
  useLayoutEffect(() => place.current.replaceChildren(nodesOf(text)), [text]);
  return html`<div class="markdown" ref=${place} onClick=${copyCode}></div>`;
}
