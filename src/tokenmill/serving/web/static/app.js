// The frame of the page: its tabs, the key that the server may ask for, light and dark.

import { key } from "./api.js";
import { Chat } from "./chat.js";
import { Live } from "./live.js";
import { Reference } from "./reference.js";
import { html, render, useEffect, useRef, useState } from "./ui.js";

const TABS = { chat: "Chat", live: "Live", api: "API" };
const THEME = "tokenmill-theme";
const THEMES = ["system", "light", "dark"];

function tabOfAddress() {
  const name = location.hash.slice(1);
  if (Object.hasOwn(TABS, name)) return name;
  return location.pathname.endsWith("/docs") ? "api" : "chat";
}

function App() {
  const [tab, setTab] = useState(tabOfAddress);
  const [asksKey, askKey] = useState(false);
  useEffect(() => {
    const onHash = () => setTab(tabOfAddress());
    addEventListener("hashchange", onHash);
    const leave = key.watch((what) => askKey(what === "needed"));
    return () => {
      removeEventListener("hashchange", onHash);
      leave();
    };
  }, []);
  return html`<header class="top">
      <h1>TokenMill</h1>
      <nav aria-label="Parts of the page">${Object.entries(TABS).map(([name, label]) => html`<a key=${name} href=${`#${name}`}
        aria-current=${name === tab ? "page" : undefined}>${label}</a>`)}</nav>
      <span class="gap"></span>
      <button type="button" class="quiet" onClick=${() => askKey(true)}>Key</button>
      <${Theme} />
    </header>
    ${asksKey && html`<${KeyDialog} close=${() => askKey(false)} />`}
    <main>
      <${Chat} isShown=${tab === "chat"} />
      <${Live} isShown=${tab === "live"} />
      <${Reference} isShown=${tab === "api"} />
    </main>`;
}

function KeyDialog({ close }) {
  const dialog = useRef();
  const [value, set] = useState(key.get());
  useEffect(() => dialog.current.showModal(), []);
  const save = (event) => {
    event.preventDefault();
    key.set(value.trim());
    close();
  };
  return html`<dialog ref=${dialog} aria-labelledby="key-title" onClose=${close}>
    <form onSubmit=${save}>
      <h2 id="key-title">The server's API key</h2>
      <p>It stays in this tab, and is forgotten with it.</p>
      <label>Key<input type="password" autocomplete="off" value=${value} onInput=${(event) => set(event.target.value)} />
      </label>
      <button type="submit">Use this key</button>
      <button type="button" class="quiet" onClick=${close}>Cancel</button>
    </form></dialog>`;
}

function Theme() {
  const [theme, set] = useState(() => localStorage.getItem(THEME) ?? THEMES[0]);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(THEME, theme);
  }, [theme]);
  const next = () => set(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
  return html`<button type="button" class="quiet" onClick=${next}>Colours: ${theme}</button>`;
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
