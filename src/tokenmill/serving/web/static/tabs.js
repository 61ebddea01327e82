// A row of tabs: one is chosen; arrow keys go through them.

import { html, useRef } from "./ui.js";

// `tabs`: a name and a text of each.
export function Tabs({ label, tabs, chosen, choose }) {
  const place = useRef();
  const onKey = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const at = tabs.findIndex(([name]) => name === chosen);
    const next = (at + step + tabs.length) % tabs.length;
    choose(tabs[next][0]);
    place.current.children[next].focus();
  };
  return html`<div class="tabs" role="tablist" aria-label=${label} ref=${place} onKeyDown=${onKey}>
    ${tabs.map(([name, text]) => html`<button type="button" role="tab" key=${name} class="quiet" aria-selected=${name === chosen}
      tabindex=${name === chosen ? 0 : -1} onClick=${() => choose(name)}>${text}</button>`)}</div>`;
}
