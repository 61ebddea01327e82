// The tab of conversations: their list, the one that is open, and the box that asks.

import { Announcer } from "./announcer.js";
import { getJson, key } from "./api.js";
import { asCurl, asPython } from "./body.js";
import { Composer } from "./composer.js";
import { branch, siblings } from "./conversation.js";
import { canGoOn, Desk } from "./desk.js";
import { useFollow } from "./follow.js";
import { List } from "./list.js";
import { Message } from "./message.js";
import { Settings } from "./settings.js";
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
    watch: (draw) => desk.answers.watch(desk.open.id, draw),
  };
  return html`<div class="chat" hidden=${!isShown}>
    <nav class="list ${panel === "list" ? "shown" : ""}" aria-label="Conversations"
      onKeyDown=${(event) => panel === "list" && closesByEscape(event, () => showPanel(""))}>
      <${List} desk=${desk} close=${() => showPanel("")} /></nav>
    <section class="talk" aria-label="Conversation">
      <div class="bar">
        <button type="button" class="quiet narrow" aria-expanded=${panel === "list"} onClick=${() => toggle("list")}>
          Conversations</button>
        <span class="model" title=${model.name}>${model.name}</span>
        <${Copy} label="Copy as curl" text=${() => asCurl(desk.request())} />
        <${Copy} label="Copy as Python" text=${() => asPython(desk.request())} />
        <button type="button" class="quiet" aria-expanded=${panel === "settings"} onClick=${() => toggle("settings")}>
          Settings</button>
      </div>
      <div class="scroller">
        <div class="messages" tabindex="0" role="region" aria-label="Messages" ref=${box} ...${follow.handlers}>
          <div class="sheet" ref=${sheet}>
            ${shown.length === 0 && html`<${Greeting} model=${model} ask=${(text) => desk.send(text, [])} />`}
            <${Tools} text=${desk.open.settings.tools} />
            ${shown.map((message) => html`<${Message} key=${desk.open.id + message.id} message=${message} acts=${acts}
              choices=${siblings(desk.open, message)} isBusy=${desk.writes !== ""}
              canGoOn=${message === last && canGoOn(message)} />`)}
            ${desk.error && html`<p class="error" role="alert">${desk.error}</p>`}
          </div>
        </div>
        ${!follow.follows && html`<button type="button" class="to-end" onClick=${follow.toEnd}>
          ${desk.writes ? "Follow the answer" : "To the end"} ↓</button>`}
      </div>
      <${Announcer} answers=${desk.answers} id=${desk.open.id} writes=${desk.writes} />
      <${Composer} desk=${desk} last=${last} takesImages=${model.takesImages} isShown=${isShown} onSend=${follow.toEnd} />
    </section>
    ${panel === "settings" && html`<${Settings} settings=${desk.open.settings} defaults=${model.defaults}
      change=${(settings) => desk.set(settings)} close=${() => showPanel("")} />`}
    ${desk.removed && html`<${Removed} desk=${desk} />`}
  </div>`;
}

const AGAIN_MS = 5000;

function useModel(desk) {
  const [model, set] = useState({ name: "", defaults: {}, limit: 0, takesImages: false });
  useEffect(() => {
    let timer = 0;
    const load = async () => {
      clearTimeout(timer);
      try {
        const [info, models] = await Promise.all([getJson("server_info"), getJson("v1/models")]);
        const { max_model_len: limit, takes_images: takesImages } = info.engine;
        set({ name: models.data[0].id, defaults: info.default_sampling, limit, takesImages });
      } catch (error) {
        // A key is asked for, or the server is away: the first message says which.
        if (error.status !== 401) timer = setTimeout(load, AGAIN_MS);
      }
    };
    load();
    desk.reloadModel = load;
    const leave = key.watch((what) => what === "changed" && load());
    return () => {
      clearTimeout(timer);
      leave();
    };
  }, []);
  return model;
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

// Things to try: of what most models can do, in a few seconds each.
const TRIES = ["Tell me a short story about a dog.", "Explain what a token is, in three sentences.",
  "Write a Python function that counts the words of a text."];

function Greeting({ model, ask }) {
  return html`<div class="greeting"><h2>Ask ${model.name || "the model"} something</h2>
    <div class="tries">${TRIES.map((text) => html`<button type="button" class="quiet" key=${text}
      onClick=${() => ask(text)}>${text}</button>`)}</div>
    <p>Conversations stay in this browser.</p>
    <p class="keys"><kbd>Enter</kbd> sends, <kbd>Shift</kbd>+<kbd>Enter</kbd> begins a line,${" "}
    <kbd>Esc</kbd> stops, <kbd>Ctrl</kbd>+<kbd>K</kbd> searches, <kbd>Ctrl</kbd>+<kbd>Shift</kbd>+<kbd>O</kbd> begins anew,${" "}
    <kbd>Ctrl</kbd>+<kbd>Shift</kbd>+<kbd>S</kbd> opens the settings.</p></div>`;
}

function Tools({ text }) {
  let tools = [];
  try {
    tools = JSON.parse(text || "[]");
  } catch {
    return null;
  }
  if (!Array.isArray(tools) || !tools.length) return null;
  return html`<details class="tools"><summary>${tools.length} tools that the model may call</summary>
    ${tools.map((tool) => html`<div class="call"><b>${tool?.function?.name ?? "unnamed"}</b>
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
  return html`<div class="removed" role="status"><span>Deleted “${desk.removed.title || "Untitled"}”</span>
    <button type="button" ref=${undo} onClick=${() => desk.restore()}>Undo</button>
    <button type="button" class="quiet" aria-label="Dismiss" onClick=${() => desk.dismiss()}>×</button></div>`;
}
