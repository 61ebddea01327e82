// The tab that asks two models, or one with two presets, the same question with the same seed, and shows both answers
// side by side. Both can be kept: as two branches of a conversation.

import { bodyOf } from "./body.js";
import { add, newConversation } from "./conversation.js";
import { begin, generate, speed } from "./generate.js";
import { Markdown } from "./markdown.js";
import { useModels } from "./models.js";
import { place } from "./place.js";
import { presets } from "./presets.js";
import { keep, tellHere, whyNotKept } from "./store.js";
import { number, t } from "./texts.js";
import { html, oncePerFrame, useRef, useRedraw, useState } from "./ui.js";

const SIDES = [0, 1];
const MOST_SEED = 2 ** 31;
const NO_PRESET = "";

export function Compare({ isShown }) {
  const redraw = useRedraw();
  const { list } = useModels();
  const [chosen, choose] = useState(SIDES.map(() => ({ model: "", preset: NO_PRESET })));
  const [text, setText] = useState("");
  const [seed, setSeed] = useState(1);
  const [error, fail] = useState("");
  const run = useRef({ answers: [], controller: null, text: "" }).current;
  const modelOf = ({ model }) => (list.some(({ id }) => id === model) ? model : list[0]?.id ?? "");
  const settingsOf = ({ preset }) => ({ ...(presets.all()[preset] ?? place.settings()), seed });
  const ask = async (event) => {
    event.preventDefault();
    if (!text.trim() || run.controller) return;
    fail("");
    let bodies;
    try {
      bodies = chosen.map((side) => bodyOf(settingsOf(side), [{ role: "user", content: text }], modelOf(side)));
    } catch (problem) {
      fail(problem.message);
      return;
    }
    const draw = oncePerFrame(redraw);
    const controller = new AbortController();
    const answers = chosen.map((side) => ({ role: "assistant", model: modelOf(side), preset: side.preset, settings: settingsOf(side), state: "writing" }));
    Object.assign(run, { controller, text, answers, isKept: false });
    redraw();
    await Promise.all(answers.map((answer, index) => write(answer, bodies[index], controller.signal, draw)));
    run.controller = null;
    redraw();
  };
  const keepBoth = async () => {
    const conversation = newConversation();
    const asked = add(conversation, null, { role: "user", content: run.text });
    for (const { preset, ...answer } of run.answers) add(conversation, asked.id, answer);
    try {
      await keep(conversation);
      tellHere({ id: conversation.id, what: "kept" });
      run.isKept = true;
      redraw();
    } catch (problem) {
      fail(await whyNotKept(problem));
    }
  };
  const isOver = run.answers.length > 0 && !run.controller;
  return html`<section class="compare" hidden=${!isShown} aria-label=${t("tab.compare")}>
    <form onSubmit=${ask}>
      <div class="sides">${SIDES.map((side) => html`<${Side} key=${side} ...${{ side, list, chosen: { ...chosen[side], model: modelOf(chosen[side]) } }}
        choose=${(one) => choose(Object.assign([...chosen], { [side]: one }))} />`)}</div>
      <label>${t("compare.question")}<textarea rows="3" value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label>
      <div class="row"><label class="seed">${t("sampling.seed")}<input type="number" min="0" max=${MOST_SEED} step="1" value=${seed}
          onInput=${(event) => setSeed(Number(event.target.value) || 0)} /></label>
        ${run.controller ? html`<button type="button" class="stop" onClick=${() => run.controller.abort()}>${t("composer.stop")}</button>`
          : html`<button type="submit" disabled=${!text.trim()}>${t("compare.ask")}</button>`}
        ${isOver && html`<button type="button" class="quiet" disabled=${run.isKept} onClick=${keepBoth}>${run.isKept ? t("compare.kept") : t("compare.keep")}</button>`}
      </div>
      ${error && html`<p class="error" role="alert">${error}</p>`}
      <p class="hint">${t("compare.hint")}</p>
    </form>
    <div class="sides" role="status" aria-live=${run.controller ? "off" : "polite"}>${run.answers.map((answer, index) => html`<${Answer} key=${index} answer=${answer} side=${index} />`)}</div>
  </section>`;
}

async function write(answer, body, signal, draw) {
  begin(answer);
  try {
    await generate(answer, body, signal, draw);
    answer.state = "whole";
  } catch (error) {
    const isStopped = signal.aborted;
    Object.assign(answer, isStopped ? { state: "stopped", finish: "stopped" } : { state: "broken", error: error.message });
  }
}

function Side({ side, list, chosen, choose }) {
  const names = Object.keys(presets.all()).sort();
  return html`<fieldset><legend>${t("compare.side", { side: side + 1 })}</legend>
    <label>${t("compare.model")}<select value=${chosen.model} onChange=${(event) => choose({ ...chosen, model: event.target.value })}>
      ${list.map(({ id }) => html`<option key=${id} value=${id}>${id}</option>`)}</select></label>
    <label>${t("compare.settings")}<select value=${chosen.preset} onChange=${(event) => choose({ ...chosen, preset: event.target.value })}>
      <option value=${NO_PRESET}>${t("compare.current")}</option>
      ${names.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}</select></label></fieldset>`;
}

function Answer({ answer, side }) {
  const { model, preset, reasoning, content = "", state, error, usage, seconds } = answer;
  const facts = [usage && t("cost.tokens", { count: usage.completion_tokens }), usage && speed(answer) > 0 &&
    t("cost.speed", { speed: number.format(speed(answer)) }), seconds?.first > 0 && t("cost.first", { seconds: seconds.first.toFixed(2) })];
  return html`<article class="message compared" aria-label=${t("compare.side", { side: side + 1 })}>
    <header><b>${model}</b> ${preset}</header>
    ${reasoning && html`<details class="reasoning"><summary>${t("message.thinking")}</summary><${Markdown} text=${reasoning} isOpen=${state === "writing"} /></details>`}
    <${Markdown} text=${content} isOpen=${state === "writing"} />
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <footer><span class="cost">${facts.filter(Boolean).join(" · ") || "…"}</span></footer></article>`;
}
