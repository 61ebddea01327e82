// The frame of the page: its tabs, the key that the server may ask for, light and dark.

import { key } from "./api.js";
import { Chat } from "./chat.js";
import { Compare } from "./compare.js";
import { Live } from "./live.js";
import { Reference } from "./reference.js";
import { language, LANGUAGES, setLanguage, t } from "./texts.js";
import { html, render, useLayoutEffect, useRef, useState } from "./ui.js";

const TABS = ["chat", "compare", "live", "api"];
const THEME = "tokenmill-theme";
const THEMES = ["system", "light", "dark"];

function tabOfAddress() {
  const name = location.hash.slice(1);
  if (TABS.includes(name)) return name;
  return location.pathname.endsWith("/docs") ? "api" : "chat";
}

function App() {
  const [tab, setTab] = useState(tabOfAddress);
  const [asksKey, askKey] = useState(false);
  // Before anything can be seen, and so clicked.
  useLayoutEffect(() => {
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
      <nav aria-label=${t("tabs")}>${TABS.map((name) => html`<a key=${name} href=${`#${name}`}
        aria-current=${name === tab ? "page" : undefined}>${t(`tab.${name}`)}</a>`)}</nav>
      <span class="gap"></span>
      <button type="button" class="quiet" onClick=${() => askKey(true)}>${t("key")}</button>
      <${Language} />
      <${Theme} />
    </header>
    ${asksKey && html`<${KeyDialog} close=${() => askKey(false)} />`}
    <main>
      <${Chat} isShown=${tab === "chat"} />
      <${Compare} isShown=${tab === "compare"} />
      <${Live} isShown=${tab === "live"} />
      <${Reference} isShown=${tab === "api"} />
    </main>`;
}

function KeyDialog({ close }) {
  const dialog = useRef();
  const [value, set] = useState(key.get());
  useLayoutEffect(() => dialog.current.showModal(), []);
  const save = (event) => {
    event.preventDefault();
    key.set(value.trim());
    close();
  };
  return html`<dialog ref=${dialog} aria-labelledby="key-title" onClose=${close}>
    <form onSubmit=${save}>
      <h2 id="key-title">${t("key.title")}</h2>
      <p>${t("key.hint")}</p>
      <label>${t("key")}<input type="password" autocomplete="off" value=${value} onInput=${(event) => set(event.target.value)} />
      </label>
      <button type="submit">${t("key.use")}</button>
      <button type="button" class="quiet" onClick=${close}>${t("cancel")}</button>
    </form></dialog>`;
}

function Language() {
  return html`<select class="language" aria-label=${t("language")} value=${language} onChange=${(event) => setLanguage(event.target.value)}>
    ${Object.entries(LANGUAGES).map(([name, text]) => html`<option key=${name} value=${name} lang=${name}>${text}</option>`)}</select>`;
}

function Theme() {
  const [theme, set] = useState(() => localStorage.getItem(THEME) ?? THEMES[0]);
  useLayoutEffect(() => {
    document.documentElement.dataset.theme = theme;
    localStorage.setItem(THEME, theme);
  }, [theme]);
  const next = () => set(THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length]);
  const text = t("theme", { theme: t(`theme.${theme}`) });
  return html`<button type="button" class="quiet theme" aria-label=${text} title=${text} onClick=${next}><span>${text}</span></button>`;
}

const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);
