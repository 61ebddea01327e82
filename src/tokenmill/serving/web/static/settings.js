// The drawer: system prompt, sampling (empty fields: what the model's makers say), tools and the schema of answers.

import { MOST_ALTERNATIVES, SAMPLING } from "./body.js";
import { closesByEscape, html, useFocusInside, useRef } from "./ui.js";

export function Settings({ settings, defaults, change, close }) {
  const place = useRef();
  useFocusInside(place);
  const set = (name, value) => change({ ...settings, [name]: value });
  const area = (name, label, rows, hint) => html`<label>${label}
    <textarea rows=${rows} placeholder=${hint} value=${settings[name] ?? ""} spellcheck=${name === "system"}
      onInput=${(event) => set(name, event.target.value)}></textarea></label>`;
  return html`<aside class="drawer" aria-label="Settings of this conversation" ref=${place}
      onKeyDown=${(event) => closesByEscape(event, close)}>
    <header><h2>Settings</h2><button type="button" class="quiet" onClick=${close}>Close</button></header>
    ${area("system", "System prompt", 4, "none")}
    <div class="grid">${SAMPLING.map((field) => html`<${Field} key=${field.name} field=${field} settings=${settings}
      set=${set} fallback=${defaults[field.name]} />`)}</div>
    ${area("stop", "Stop at these texts, one a line", 2, "none")}
    <label class="check"><input type="checkbox" checked=${settings.alternatives !== false}
      onChange=${(event) => set("alternatives", event.target.checked)} />
      Keep the ${MOST_ALTERNATIVES} likeliest tokens of each place</label>
    ${area("tools", "Tools, a JSON list as OpenAI's API takes it", 5, '[{"type": "function", "function": {…}}]')}
    ${area("schema", "JSON schema that answers must match", 4, "none")}
    <p class="hint">Empty fields leave the choice to the model's defaults. Nothing of this leaves the browser but with a
      message.</p>
  </aside>`;
}

function Field({ field: { name, label, step, min, max }, settings, set, fallback }) {
  const read = (event) => set(name, event.target.value === "" ? undefined : Number(event.target.value));
  return html`<label>${label}<input type="number" step=${step} min=${min} max=${max} value=${settings[name] ?? ""}
    placeholder=${fallback ?? "none"} onInput=${read} /></label>`;
}
