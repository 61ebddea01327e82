// The tab of conversations: their list, the one that is open, and the box that asks.

import { getJson, key } from "./api.js";
import { asCurl, asPython, bodyOf } from "./body.js";
import { add, ancestors, branch, choose, imported, newConversation, siblings } from "./conversation.js";
import { generate } from "./generate.js";
import { Images, Message } from "./message.js";
import { Settings } from "./settings.js";
import { allConversations, forget, keep } from "./store.js";
import { Copy, dataUrl, download, FileButton, html, oncePerFrame, useEffect, useLayoutEffect, useRef, useRedraw, useState } from "./ui.js";

export function Chat({ isShown }) {
  const redraw = useRedraw();
  const state = useRef({ list: [], open: newConversation(), running: new Map(), error: "", draft: "", images: [] }).current;
  const model = useModel();
  const [panel, showPanel] = useState("");
  const end = useRef();
  const desk = makeDesk(state, redraw, model);

  useEffect(() => {
    allConversations().then((list) => {
      state.list = list;
      redraw();
    });
  }, []);
  useKeys(isShown, desk, () => showPanel((shown) => (shown === "settings" ? "" : "settings")));
  const shown = branch(state.open);
  const last = shown.at(-1);
  useEffect(() => end.current?.scrollIntoView({ block: "end" }), [last?.content.length, shown.length, isShown]);

  const acts = { edit: desk.edit, again: desk.again, choose: desk.choose };
  return html`<div class="chat" hidden=${!isShown}>
    <nav class="list ${panel === "list" ? "shown" : ""}" aria-label="Conversations">
      <${List} state=${state} desk=${desk} close=${() => showPanel("")} /></nav>
    <section class="talk" aria-label="Conversation">
      <div class="bar">
        <button type="button" class="quiet narrow" onClick=${() => showPanel(panel === "list" ? "" : "list")}>
          Conversations</button>
        <span class="model" title=${model.name}>${model.name}</span>
        <${Copy} label="Copy as curl" text=${() => asCurl(desk.request())} />
        <${Copy} label="Copy as Python" text=${() => asPython(desk.request())} />
        <button type="button" class="quiet" aria-expanded=${panel === "settings"}
          onClick=${() => showPanel(panel === "settings" ? "" : "settings")}>Settings</button>
      </div>
      <div class="messages" tabindex="0" aria-label="Messages">
        ${shown.length === 0 && html`<${Greeting} model=${model} />`}
        <${Tools} text=${state.open.settings.tools} />
        ${shown.map((message) => html`<${Message} key=${state.open.id + message.id} message=${message} acts=${acts}
          version=${message.content.length} choices=${siblings(state.open, message)} isBusy=${state.running.has(state.open)} />`)}
        ${state.error && html`<p class="error" role="alert">${state.error}</p>`}
        <div ref=${end}></div>
      </div>
      <${Composer} state=${state} desk=${desk} last=${last} redraw=${redraw} takesImages=${model.takesImages} />
    </section>
    ${panel === "settings" && html`<${Settings} settings=${state.open.settings} defaults=${model.defaults}
      change=${desk.set} close=${() => showPanel("")} />`}
  </div>`;
}

// What can be done with the open conversation and the list of them.
function makeDesk(state, redraw, model) {
  const save = () => {
    if (state.open.messages.length) keep(state.open).catch((error) => fail(`not kept: ${error.message}`));
  };
  const fail = (text) => {
    state.error = text;
    redraw();
  };
  async function answer(conversation, parent) {
    const context = [...ancestors(conversation, parent), parent];
    let body;
    try {
      body = bodyOf(conversation.settings, context, model.name);
    } catch (error) {
      fail(error.message);
      return;
    }
    const message = add(conversation, parent.id, { role: "assistant", content: "" });
    const controller = new AbortController();
    state.running.set(conversation, controller);
    state.error = "";
    if (!state.list.includes(conversation)) state.list.unshift(conversation);
    await generate(message, body, controller.signal, oncePerFrame(redraw));
    state.running.delete(conversation);
    if (state.list.includes(conversation)) await keep(conversation).catch((error) => fail(`not kept: ${error.message}`));
    redraw();
  }
  return {
    send(text, images) {
      const parent = branch(state.open).at(-1)?.id ?? null;
      const fields = images.length ? { role: "user", content: text, images } : { role: "user", content: text };
      return answer(state.open, add(state.open, parent, fields));
    },
    async show(files) {
      try {
        for (const file of files) if (file.type.startsWith("image/")) state.images.push(await dataUrl(file));
      } catch (error) {
        state.error = `the image cannot be read: ${error.message}`;
      }
      redraw();
    },
    give(calls, results) {
      let parent = branch(state.open).at(-1);
      calls.forEach(({ id, name }, index) => {
        parent = add(state.open, parent.id, { role: "tool", name, callId: id, content: results[index] ?? "" });
      });
      return answer(state.open, parent);
    },
    edit(message, text) {
      const copy = add(state.open, message.parent, { ...message, content: text, tokens: [] });
      save();
      redraw();
      return message.role === "user" ? answer(state.open, copy) : undefined;
    },
    again(message) {
      const parent = state.open.messages.find(({ id }) => id === message.parent);
      return answer(state.open, parent);
    },
    choose(message) {
      choose(state.open, message);
      save();
      redraw();
    },
    set(settings) {
      state.open.settings = settings;
      save();
      redraw();
    },
    open(conversation) {
      Object.assign(state, { open: conversation, error: "" });
      redraw();
    },
    start() {
      Object.assign(state, { open: { ...newConversation(), settings: { ...state.open.settings } }, error: "" });
      redraw();
    },
    async remove(conversation) {
      state.list = state.list.filter((one) => one !== conversation);
      state.running.get(conversation)?.abort();
      if (state.open === conversation) state.open = newConversation();
      await forget(conversation.id);
      redraw();
    },
    async take(file) {
      try {
        const data = JSON.parse(await file.text());
        const found = (Array.isArray(data) ? data : [data]).map(imported);
        for (const conversation of found) await keep(conversation);
        state.list.unshift(...found);
        if (found.length) state.open = found[0];
        state.error = "";
      } catch (error) {
        state.error = `${file.name}: ${error.message}`;
      }
      redraw();
    },
    request() {
      const shown = branch(state.open);
      return bodyOf(state.open.settings, shown.at(-1)?.role === "assistant" ? shown.slice(0, -1) : shown, model.name);
    },
    stop: () => state.running.get(state.open)?.abort(),
  };
}

function useModel() {
  const [model, set] = useState({ name: "", defaults: {}, limit: 0, takesImages: false });
  useEffect(() => {
    const load = async () => {
      try {
        const [info, models] = await Promise.all([getJson("server_info"), getJson("v1/models")]);
        const { max_model_len: limit, takes_images: takesImages } = info.engine;
        set({ name: models.data[0].id, defaults: info.default_sampling, limit, takesImages });
      } catch {
        // A key is asked for, or the server is away: the first message says which.
      }
    };
    load();
    return key.watch((what) => what === "changed" && load());
  }, []);
  return model;
}

// As soon as the page can be seen: an effect would come a frame later, and a key before that do nothing.
function useKeys(isShown, desk, toggleSettings) {
  useLayoutEffect(() => {
    if (!isShown) return undefined;
    const onKey = (event) => {
      if (event.key === "Escape") desk.stop();
      if (!(event.ctrlKey || event.metaKey) || !event.shiftKey) return;
      const act = { O: desk.start, S: toggleSettings }[event.key.toUpperCase()];
      if (!act) return;
      event.preventDefault();
      act();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  });
}

function Greeting({ model }) {
  return html`<div class="greeting"><h2>Ask ${model.name || "the model"} something</h2>
    <p>Conversations stay in this browser. <kbd>Enter</kbd> sends, <kbd>Shift</kbd>+<kbd>Enter</kbd> begins a line,
    <kbd>Esc</kbd> stops, <kbd>Ctrl</kbd>+<kbd>Shift</kbd>+<kbd>O</kbd> begins anew,
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

function Composer({ state, desk, last, redraw, takesImages }) {
  const [results, setResults] = useState([]);
  const isBusy = state.running.has(state.open);
  const calls = last?.role === "assistant" && !isBusy ? last.calls ?? [] : [];
  const send = (event) => {
    event?.preventDefault();
    if (isBusy) return;
    if (calls.length) {
      desk.give(calls, results);
      setResults([]);
      return;
    }
    const { draft, images } = state;
    if (!draft.trim() && !images.length) return;
    Object.assign(state, { draft: "", images: [] });
    desk.send(draft, images);
    redraw();
  };
  // Images come by the button, dropped or pasted; where the model takes none, files go where they always went.
  const takeFrom = (transfer) => (event) => {
    const files = [...(event[transfer]?.files ?? [])];
    if (!takesImages || !files.length) return;
    event.preventDefault();
    desk.show(files);
  };
  const remove = (index) => {
    state.images.splice(index, 1);
    redraw();
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  const write = (event) => {
    state.draft = event.target.value;
    redraw();
  };
  return html`<form class="composer" onSubmit=${send} onPaste=${takeFrom("clipboardData")}
      onDrop=${takeFrom("dataTransfer")} onDragOver=${(event) => takesImages && event.preventDefault()}>
    <${Images} urls=${state.images} remove=${remove} />
    ${calls.length > 0 ? calls.map((call, index) => html`<label key=${call.id}>Result of ${call.name}
        <textarea rows="2" value=${results[index] ?? ""}
          onInput=${(event) => setResults(Object.assign([...results], { [index]: event.target.value }))}></textarea></label>`)
      : html`<textarea aria-label="Your message" placeholder="Your message" rows=${Math.min(8, state.draft.split("\n").length)}
          value=${state.draft} onInput=${write} onKeyDown=${onKey}></textarea>`}
    ${takesImages && !calls.length && html`<${FileButton} label="Add an image" accept="image/*"
      onFile=${(file) => desk.show([file])} />`}
    ${isBusy ? html`<button type="button" class="stop" onClick=${desk.stop}>Stop</button>`
      : html`<button type="submit">Send</button>`}
  </form>`;
}

function List({ state, desk, close }) {
  const [wanted, search] = useState("");
  const holds = (conversation) => !wanted || JSON.stringify([conversation.title, conversation.messages.map(
    ({ content }) => content)]).toLowerCase().includes(wanted.toLowerCase());
  const pick = (act) => () => {
    act();
    close();
  };
  const save = () => download("conversations.json", JSON.stringify(state.list, null, 1));
  return html`<button type="button" onClick=${pick(desk.start)}>New conversation</button>
    <input type="search" aria-label="Search conversations" placeholder="Search" value=${wanted}
      onInput=${(event) => search(event.target.value)} />
    <ul>${state.list.filter(holds).map((conversation) => html`<li key=${conversation.id}
        class=${conversation === state.open ? "open" : ""}>
      <button type="button" class="quiet title" onClick=${pick(() => desk.open(conversation))}>
        ${conversation.title || "Untitled"}</button>
      <button type="button" class="quiet" aria-label=${`Delete ${conversation.title || "Untitled"}`}
        onClick=${() => desk.remove(conversation)}>×</button></li>`)}</ul>
    <div class="row"><button type="button" class="quiet" disabled=${!state.list.length} onClick=${save}>Export</button>
      <${FileButton} label="Import" accept="application/json,.json" onFile=${desk.take} /></div>`;
}
