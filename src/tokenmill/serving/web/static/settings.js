// The drawer: system prompt, sampling (empty fields: what the model's makers say), tools and the schema of answers.

import { MOST_ALTERNATIVES, SAMPLING } from "./body.js";
import { wholeTokens } from "./documents.js";
import { Presets } from "./presets.js";
import { t } from "./texts.js";
import { closesByEscape, html, useFocusInside, useRef } from "./ui.js";

// Tokens of thinking at most: a model that thinks longer is told to answer.
const BUDGET = { name: "budget", step: 1, min: 0 };
// Tokens of files that are sent whole at most: of longer ones the passages that a message is about.
const FILE_TOKENS = { name: "fileTokens", step: 1, min: 0 };

export function Settings({ settings, model, change, close }) {
  const place = useRef();
  useFocusInside(place);
  const set = (name, value) => change({ ...settings, [name]: value });
  const area = (name, label, rows, hint) => html`<label>${label}
    <textarea rows=${rows} placeholder=${hint} value=${settings[name] ?? ""} spellcheck=${name === "system"}
      onInput=${(event) => set(name, event.target.value)}></textarea></label>`;
  return html`<aside class="drawer" aria-label=${t("settings.label")} ref=${place}
      onKeyDown=${(event) => closesByEscape(event, close)}>
    <header><h2>${t("settings")}</h2><button type="button" class="quiet" onClick=${close}>${t("close")}</button></header>
    <${Presets} settings=${settings} change=${(taken) => change({ ...taken, model: settings.model })} />
    ${area("system", t("settings.system"), 4, t("none"))}
    <div class="grid">${SAMPLING.map((field) => html`<${Field} key=${field.name} field=${field} settings=${settings}
      set=${set} fallback=${model.defaults[field.name]} />`)}</div>
    <div class="grid"><label>${t("thinking")}<select value=${settings.thinking ?? ""} onChange=${(event) => set("thinking", event.target.value)}>
        ${["", "on", "off"].map((one) => html`<option key=${one} value=${one}>${t(`thinking.${one || "default"}`)}</option>`)}</select></label>
      <${Field} field=${BUDGET} settings=${settings} set=${set} />
      <${Field} field=${FILE_TOKENS} settings=${settings} set=${set} fallback=${wholeTokens(model)} /></div>
    ${area("stop", t("settings.stop"), 2, t("none"))}
    <label class="check"><input type="checkbox" checked=${settings.alternatives !== false}
      onChange=${(event) => set("alternatives", event.target.checked)} />
      ${t("settings.alternatives", { count: MOST_ALTERNATIVES })}</label>
    ${area("tools", t("settings.tools"), 5, '[{"type": "function", "function": {…}}]')}
    ${area("schema", t("settings.schema"), 4, t("none"))}
    <p class="hint">${t("settings.hint")}</p>
  </aside>`;
}

function Field({ field: { name, step, min, max }, settings, set, fallback }) {
  const read = (event) => set(name, event.target.value === "" ? undefined : Number(event.target.value));
  return html`<label>${t(`sampling.${name}`)}<input type="number" step=${step} min=${min} max=${max} value=${settings[name] ?? ""}
    placeholder=${fallback ?? t("none")} onInput=${read} /></label>`;
}
