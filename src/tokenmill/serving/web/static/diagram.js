// A diagram in mermaid's words as a picture. A frame draws it that can touch nothing of this page; a picture runs nothing.

import { t } from "./texts.js";
import { html, useEffect, useState } from "./ui.js";

const MOST_MS = 30_000;
const waiting = new Map(); // by number: what is called with the drawing
let frame = null;
let count = 0;

export function Diagram({ text }) {
  const [drawn, set] = useState({});
  useEffect(() => {
    let isOver = false;
    draw(text).then((svg) => !isOver && set({ svg }), (error) => !isOver && set({ error: error.message }));
    return () => {
      isOver = true;
    };
  }, [text]);
  if (drawn.error !== undefined) return html`<p class="error" role="alert">${t("diagram.wrong", { reason: drawn.error })}</p><pre tabindex="0">${text}</pre>`;
  if (!drawn.svg) return html`<p class="hint">${t("diagram.wait")}</p>`;
  const [, width] = /viewBox="\S+ \S+ ([\d.]+) /.exec(drawn.svg) ?? [];
  return html`<img class="diagram" alt=${text} width=${width && Math.ceil(width)}
    src=${`data:image/svg+xml;charset=utf-8,${encodeURIComponent(drawn.svg)}`} />`;
}

// The drawing as SVG. One that takes too long takes its frame with it.
async function draw(text) {
  const id = (count += 1);
  const theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "default";
  let timer;
  const drawn = new Promise((resolve, reject) => {
    waiting.set(id, ({ svg, error }) => (svg ? resolve(svg) : reject(new Error(error))));
    timer = setTimeout(() => {
      frame?.then(({ remove }) => remove());
      frame = null;
      reject(new Error(t("diagram.slow")));
    }, MOST_MS);
  });
  frame ??= opened();
  frame.then(({ send }) => send({ id, text, theme }));
  try {
    return await drawn;
  } finally {
    clearTimeout(timer);
    waiting.delete(id);
  }
}

function opened() {
  const element = Object.assign(document.createElement("iframe"), { className: "drawing", title: "mermaid", tabIndex: -1 });
  element.sandbox = "allow-scripts";
  element.ariaHidden = "true";
  element.src = new URL("./diagram.html", import.meta.url);
  return new Promise((resolve) => {
    const hear = ({ data, source }) => {
      if (source !== element.contentWindow) return;
      if (data.isReady) resolve({ send: (wanted) => element.contentWindow.postMessage(wanted, "*"), remove });
      else waiting.get(data.id)?.(data);
    };
    const remove = () => {
      removeEventListener("message", hear);
      element.remove();
    };
    addEventListener("message", hear);
    document.body.append(element);
  });
}
