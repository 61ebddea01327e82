// The drawer of models: which one answers, and on a server of several in which state each is, loaded and unloaded by hand.

import { models, refreshModels } from "./models.js";
import { number, t } from "./texts.js";
import { closesByEscape, html, useEffect, useFocusInside, useRef } from "./ui.js";

const BUSY = ["loading", "unloading", "draining"];
const TASKS = ["embed", "rerank", "classify"];

export function ModelsPanel({ chosen, choose, close }) {
  const place = useRef();
  useFocusInside(place);
  useEffect(() => {
    refreshModels(); // adapters come and go while a server runs
  }, []);
  const bases = models.list.filter(({ parent }) => !parent);
  const adapters = (id) => models.list.filter(({ parent }) => parent === id);
  return html`<aside class="drawer" aria-label=${t("models.label")} ref=${place} onKeyDown=${(event) => closesByEscape(event, close)}>
    <header><h2>${t("models")}</h2><button type="button" class="quiet" onClick=${close}>${t("close")}</button></header>
    ${models.error && html`<p class="error" role="alert">${models.error}</p>`}
    <ul class="models">${bases.map((model) => html`<li key=${model.id}>
      <${Choice} id=${model.id} isChosen=${model.id === chosen} choose=${choose} />
      <${State} model=${model} />
      ${adapters(model.id).length > 0 && html`<ul aria-label=${t("models.adapters", { name: model.id })}>${adapters(model.id).map(({ id }) =>
        html`<li key=${id}><${Choice} id=${id} isChosen=${id === chosen} choose=${choose} /></li>`)}</ul>`}</li>`)}</ul>
    <p class="hint">${t(models.areSeveral ? "models.hintSeveral" : "models.hintOne")}</p>
  </aside>`;
}

function Choice({ id, isChosen, choose }) {
  return html`<label class="check"><input type="radio" name="model" checked=${isChosen} onChange=${() => choose(id)} />${id}</label>`;
}

function State({ model }) {
  const { state, progress, problem, max_model_len: context, size, memory, stored_as: form, capabilities = [], task } = model;
  const facts = [state && t(`state.${state}`), size > 0 && t("models.size", { size: bytes(size) }),
    memory > 0 && t("models.memory", { memory: bytes(memory) }), context > 0 && t("models.context", { count: number.format(context) }), form,
    TASKS.includes(task) && t(`task.${task}`), ...capabilities.filter((name) => name in CAPABILITIES).map((name) => t(CAPABILITIES[name]))];
  return html`<p class="hint" role="status">${facts.filter(Boolean).join(" · ")}</p>
    ${progress && html`<p class="row"><progress max="1" value=${progress.share} aria-label=${t("models.progress", { name: model.id })}></progress>
      <span class="hint">${progress.text}</span></p>`}
    ${problem && html`<p class="error">${problem}</p>`}
    ${state && html`<span class="row">
      <button type="button" class="quiet" disabled=${state === "ready" || BUSY.includes(state)} aria-label=${t("models.loadNamed", { name: model.id })}
        onClick=${() => models.load(model.id)}>${t("models.load")}</button>
      <button type="button" class="quiet" disabled=${state !== "ready" && state !== "loading"} aria-label=${t("models.unloadNamed", { name: model.id })}
        onClick=${() => models.unload(model.id)}>${t("models.unload")}</button></span>`}`;
}

const CAPABILITIES = { vision: "capability.vision", audio: "capability.audio", tools: "capability.tools", thinking: "capability.thinking",
  embedding: "capability.embedding" };
const UNITS = ["B", "kB", "MB", "GB", "TB"];

function bytes(count) {
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log10(Math.max(1, count)) / 3));
  return `${number.format(count / 1000 ** power)} ${UNITS[power]}`;
}
