// The tab of conversations: their list, the one that is open, and the box that asks.

import { Announcer } from "./announcer.js";
import { getJson } from "./api.js";
import { asCurl, asPython } from "./body.js";
import { Composer } from "./composer.js";
import { branch, siblings } from "./conversation.js";
import { canGoOn, Desk } from "./desk.js";
import { useFollow } from "./follow.js";
import { List } from "./list.js";
import { Message } from "./message.js";
import { models, refreshModels, useModels } from "./models.js";
import { ModelsPanel } from "./models_panel.js";
import { Settings } from "./settings.js";
import { parts, t } from "./texts.js";
import { closesByEscape, Copy, html, useEffect, useLayoutEffect, useMemo, useRef, useRedraw, useState } from "./ui.js";

export function Chat({ isShown }) {
  const redraw = useRedraw();
  const desk = useMemo(() => new Desk(redraw), []);
  const model = (desk.model = useModel(desk));
  const [panel, showPanel] = useState("");
  const box = useRef();
  const sheet = useRef();
  const follow = useFollow(box, sheet, desk.open.id, isShown);
  useEffect(() => {
    desk.start();
  }, []);
  const toggle = (name) => showPanel((shown) => (shown === name ? "" : name));
  useKeys(isShown, desk, toggle, showPanel);
  const shown = branch(desk.open);
  const last = shown.at(-1);
  const acts = {
    edit: (...given) => desk.edit(...given), again: (one) => desk.again(one), choose: (one) => desk.choose(one),
    goOn: (one) => desk.goOn(one), branchAt: (...given) => desk.branchAt(...given),
    fail: (text) => desk.fail(text), watch: (draw) => desk.answers.watch(desk.open.id, draw),
  };
  return html`<div class="chat" hidden=${!isShown}>
    <nav class="list ${panel === "list" ? "shown" : ""}" aria-label=${t("chat.conversations")}
      onKeyDown=${(event) => panel === "list" && closesByEscape(event, () => showPanel(""))}>
      <${List} desk=${desk} close=${() => showPanel("")} /></nav>
    <section class="talk" aria-label=${t("chat.conversation")}>
      <div class="bar">
        <button type="button" class="quiet narrow" aria-expanded=${panel === "list"} onClick=${() => toggle("list")}>
          ${t("chat.conversations")}</button>
        <${ModelButton} model=${model} isOpen=${panel === "models"} open=${() => toggle("models")} />
        <span class="copies"><${Copy} label=${t("chat.curl")} text=${() => asCurl(desk.request())} />
          <${Copy} label=${t("chat.python")} text=${() => asPython(desk.request())} /></span>
        <button type="button" class="quiet" aria-expanded=${panel === "settings"} onClick=${() => toggle("settings")}>
          ${t("settings")}</button>
      </div>
      <div class="scroller">
        <div class="messages" tabindex="0" role="region" aria-label=${t("chat.messages")} ref=${box} ...${follow.handlers}>
          <div class="sheet" ref=${sheet}>
            ${shown.length === 0 && html`<${Greeting} model=${model} ask=${(text) => desk.send(text, [])} askOfFile=${(text) => {
              desk.setDraft(text);
              document.querySelector(".composer input[type=file]").click();
            }} />`}
            <${Tools} text=${desk.open.settings.tools} />
            ${shown.map((message) => html`<${Message} key=${desk.open.id + message.id} message=${message} acts=${acts}
              choices=${siblings(desk.open, message)} isBusy=${desk.writes !== ""}
              canGoOn=${message === last && canGoOn(message)} passages=${asked(shown, message)?.passages} />`)}
            ${desk.error && html`<p class="error" role="alert">${desk.error}</p>`}
          </div>
        </div>
        ${!follow.follows && html`<button type="button" class="to-end" onClick=${follow.toEnd}>
          ${desk.writes ? t("chat.follow") : t("chat.toEnd")} ↓</button>`}
      </div>
      <${Announcer} answers=${desk.answers} id=${desk.open.id} writes=${desk.writes} />
      <${Composer} desk=${desk} last=${last} isShown=${isShown} onSend=${follow.toEnd} />
    </section>
    ${panel === "settings" && html`<${Settings} settings=${desk.open.settings} model=${model}
      change=${(settings) => desk.set(settings)} close=${() => showPanel("")} />`}
    ${panel === "models" && html`<${ModelsPanel} chosen=${model.name} choose=${(id) => desk.useModel(id)} close=${() => showPanel("")} />`}
    ${desk.removed && html`<${Removed} desk=${desk} />`}
  </div>`;
}

// The model that answers in this conversation: the one that was chosen, while it is served, else the first.
function useModel(desk) {
  const { list } = useModels();
  const wanted = desk.open.settings.model;
  const card = list.find(({ id }) => id === wanted) ?? list[0];
  const [info, setInfo] = useState({ id: "", state: "", defaults: {} });
  desk.reloadModel = refreshModels;
  const { id = "", state = "" } = card ?? {};
  useEffect(() => {
    if (!id || (models.areSeveral && state !== "ready")) return undefined;
    let isOver = false;
    getJson(models.path("server_info", card.parent ?? id)).then(({ engine, default_sampling: defaults }) => {
      if (!isOver) setInfo({ id, defaults, takesImages: engine.takes_images, takesSound: engine.max_clip_seconds > 0,
        mostSeconds: engine.max_clip_seconds });
    }, () => {});
    return () => {
      isOver = true;
    };
  }, [id, state]);
  const capabilities = card?.capabilities ?? [];
  const isKnown = info.id === id && id !== "";
  return { name: id, state, progress: card?.progress, defaults: isKnown ? info.defaults : {},
    takesImages: isKnown ? info.takesImages : capabilities.includes("vision"),
    context: card?.max_model_len ?? 0, mostSeconds: isKnown ? info.mostSeconds : 0,
    takesSound: isKnown ? info.takesSound : capabilities.includes("audio") };
}

// The message of a person that an answer answers.
const asked = (shown, { role, id }) => (role === "assistant"
  ? shown.slice(0, shown.findIndex((one) => one.id === id)).findLast((one) => one.role === "user") : undefined);

function ModelButton({ model: { name, state, progress }, isOpen, open }) {
  return html`<button type="button" class="quiet model" title=${name} aria-expanded=${isOpen} onClick=${open}>${name}
    ${state && state !== "ready" && html` <small>${t(`state.${state}`)}${progress ? ` ${Math.round(100 * progress.share)} %` : ""}</small>`}
    ${name && html`<span aria-hidden="true"> ▾</span>`}</button>`;
}

// As soon as the page can be seen: an effect would come a frame later, and a key before that do nothing.
function useKeys(isShown, desk, toggle, showPanel) {
  useLayoutEffect(() => {
    if (!isShown) return undefined;
    const onKey = (event) => {
      if (event.key === "Escape") desk.stop();
      if (!(event.ctrlKey || event.metaKey)) return;
      const search = () => {
        if (matchMedia("(max-width: 48rem)").matches) showPanel("list");
        document.querySelector(".list input[type=search]")?.focus();
      };
      const act = event.shiftKey ? { O: () => desk.begin(), S: () => toggle("settings") }[event.key.toUpperCase()]
        : { k: search }[event.key];
      if (!act) return;
      event.preventDefault();
      act();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  });
}

// Three things to try, of what the model can do, in a few seconds each. The demo model knows English alone, and TokenMill.
const DEMO = "tokenmill-demo";
const WITH_FILE = ["try.image", "try.sound"];

function triesOf({ name, takesImages, takesSound }) {
  if (name === DEMO) return ["try.demo.story", "try.demo.mill", "try.demo.preempted"];
  return [takesImages && "try.image", takesSound && "try.sound", "try.story", "try.token", "try.code"].filter(Boolean).slice(0, 3);
}

function Greeting({ model, ask, askOfFile }) {
  const key = (text) => html`<kbd>${text}</kbd>`;
  const keys = { enter: key("Enter"), shift: key("Shift"), esc: key("Esc"), ctrl: key("Ctrl"), k: key("K"), o: key("O"), s: key("S") };
  return html`<div class="greeting"><h2>${model.name ? t("greeting", { model: model.name }) : t("greeting.noModel")}</h2>
    <div class="tries">${triesOf(model).map((name) => html`<button type="button" class="quiet" key=${name}
      onClick=${() => (WITH_FILE.includes(name) ? askOfFile : ask)(t(name))}>${t(name)}</button>`)}</div>
    <p>${t("greeting.kept")}</p>
    <p class="keys">${parts("greeting.keys", keys)}</p></div>`;
}

function Tools({ text }) {
  let tools = [];
  try {
    tools = JSON.parse(text || "[]");
  } catch {
    return null;
  }
  if (!Array.isArray(tools) || !tools.length) return null;
  return html`<details class="tools"><summary>${t("tools.count", { count: tools.length })}</summary>
    ${tools.map((tool) => html`<div class="call"><b>${tool?.function?.name ?? t("tools.unnamed")}</b>
      <p>${tool?.function?.description ?? ""}</p>
      <pre tabindex="0">${JSON.stringify(tool?.function?.parameters ?? {}, null, 2)}</pre></div>`)}</details>`;
}

// What was deleted last, and the way back.
function Removed({ desk }) {
  const undo = useRef();
  // The button that deleted is gone, and the focus with it.
  useEffect(() => {
    if (document.activeElement === document.body) undo.current?.focus();
  }, [desk.removed]);
  return html`<div class="removed" role="status"><span>${t("removed", { title: desk.removed.title || t("untitled") })}</span>
    <button type="button" ref=${undo} onClick=${() => desk.restore()}>${t("removed.undo")}</button>
    <button type="button" class="quiet" aria-label=${t("removed.dismiss")} onClick=${() => desk.dismiss()}>×</button></div>`;
}
