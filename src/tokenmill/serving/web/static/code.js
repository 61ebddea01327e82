// A block of code: its language, colours, a button that copies it, one that wraps long lines, and one that draws a diagram.

import { Diagram } from "./diagram.js";
import { useLibrary } from "./lazy.js";
import { t } from "./texts.js";
import { Copy, html, useMemo, useState } from "./ui.js";

// To colour more than this would hold the page up; it is shown plain.
const MOST_COLOURED = 20_000;

// `isOpen`: more of it may come, and it is coloured when all is there.
export function Code({ text, language, isOpen }) {
  const [wraps, wrap] = useState(false);
  const [isDrawn, setDrawn] = useState(false);
  const isWanted = Boolean(language) && !isOpen && text.length <= MOST_COLOURED;
  const highlighter = useLibrary("highlighter", isWanted);
  const shown = useMemo(() => (isWanted && highlighter ? coloured(highlighter, text, language) : text),
    [text, language, isWanted, highlighter]);
  return html`<div class="code"><div class="code-bar"><span>${language || t("code.plain")}</span><span class="gap"></span>
      ${language === "mermaid" && !isOpen && html`<button type="button" class="quiet" aria-pressed=${isDrawn}
        onClick=${() => setDrawn(!isDrawn)}>${t("code.draw")}</button>`}
      <button type="button" class="quiet" aria-pressed=${wraps} onClick=${() => wrap(!wraps)}>${t("code.wrap")}</button>
      <${Copy} text=${text} /></div>
    ${isDrawn && !isOpen ? html`<${Diagram} text=${text} />`
      : html`<pre tabindex="0" class=${wraps ? "wraps" : ""}><code>${shown}</code></pre>`}</div>`;
}

// As nodes: highlight.js makes a tree before it makes HTML of it.
function coloured(highlighter, text, language) {
  if (!highlighter.getLanguage(language)) return text;
  try {
    return partsOf(highlighter.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode);
  } catch {
    return text;
  }
}

const partsOf = ({ children }) => children.map((child) => (typeof child === "string" ? child : html`<span
  class=${child.scope ? `code-${child.scope.split(".")[0]}` : undefined}>${partsOf(child)}</span>`));
