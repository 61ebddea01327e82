// The list of conversations: search, open, rename, delete, and the way to files and back.

import { t } from "./texts.js";
import { FileButton, html, useEffect, useState } from "./ui.js";

const TYPING_MS = 150;

export function List({ desk, close }) {
  const [wanted, setWanted] = useState("");
  const found = useSearch(desk, wanted);
  const [renamed, rename] = useState("");
  const pick = (act) => () => {
    act();
    close();
  };
  const shown = desk.heads.filter(({ id, deleted }) => !deleted && (!found || found.has(id)));
  return html`<div class="row"><button type="button" class="new" onClick=${pick(() => desk.begin())}>${t("list.new")}</button>
      <button type="button" class="quiet narrow" onClick=${close}>${t("close")}</button></div>
    <input type="search" aria-label=${t("list.search")} placeholder=${t("search")} value=${wanted}
      onInput=${(event) => setWanted(event.target.value)} />
    <ul aria-label=${found ? t("list.found", { count: shown.length }) : t("list.all")}>${shown.map((head) => html`<li key=${head.id}
        class=${head.id === desk.open.id ? "open" : ""}>
      ${renamed === head.id ? html`<${Title} head=${head} done=${(title) => {
        rename("");
        if (title !== null) desk.rename(head, title);
      }} />` : html`<${Entry} head=${head} isOpen=${head.id === desk.open.id} open=${pick(() => desk.openHead(head))}
        rename=${() => rename(head.id)} remove=${() => desk.remove(head)} />`}</li>`)}</ul>
    <div class="row"><button type="button" class="quiet" disabled=${!desk.heads.some(({ deleted }) => !deleted)}
        onClick=${() => desk.exportAll()}>${t("list.export")}</button>
      <${FileButton} label=${t("list.import")} accept="application/json,.json" onFile=${(file) => desk.take(file)} /></div>`;
}

function Entry({ head, isOpen, open, rename, remove }) {
  const name = head.title || t("untitled");
  return html`<button type="button" class="quiet title" aria-current=${isOpen ? "true" : undefined} title=${name}
      onClick=${open} onDblClick=${rename}>${name}${head.isWriting && html`<span aria-label=${t("list.writing")}> …</span>`}</button>
    <button type="button" class="quiet small" aria-label=${t("list.rename", { name })} onClick=${rename}>✎</button>
    <button type="button" class="quiet small" aria-label=${t("list.delete", { name })} onClick=${remove}>×</button>`;
}

function Title({ head, done }) {
  const onKey = (event) => {
    if (event.key === "Enter") done(event.target.value);
    if (event.key === "Escape") done(null);
    event.stopPropagation();
  };
  return html`<input aria-label=${t("list.title")} defaultValue=${head.title} onKeyDown=${onKey}
    onBlur=${(event) => done(event.target.value)} ref=${(input) => input?.focus()} />`;
}

// The ids of what holds the text; null: nothing is searched for.
function useSearch(desk, wanted) {
  const [found, set] = useState(null);
  useEffect(() => {
    if (!wanted.trim()) {
      set(null);
      return undefined;
    }
    let isOver = false;
    const timer = setTimeout(async () => {
      const ids = await desk.search(wanted.trim());
      if (!isOver) set(ids);
    }, TYPING_MS);
    return () => {
      isOver = true;
      clearTimeout(timer);
    };
  }, [wanted]);
  return found;
}
