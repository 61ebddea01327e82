// A block of code: its language, a button that copies it, and one that wraps long lines.

import { Copy, html, useState } from "./ui.js";

export function Code({ text, language }) {
  const [wraps, wrap] = useState(false);
  return html`<div class="code"><div class="code-bar"><span>${language || "text"}</span><span class="gap"></span>
      <button type="button" class="quiet" aria-pressed=${wraps} onClick=${() => wrap(!wraps)}>Wrap</button>
      <${Copy} text=${text} /></div>
    <pre tabindex="0" class=${wraps ? "wraps" : ""}><code>${text}</code></pre></div>`;
}
