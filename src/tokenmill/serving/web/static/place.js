// Where somebody was: the open conversation, drafts, settings, how far each conversation was scrolled. It survives a
// reload of this tab (sessionStorage), and what a new tab begins with is what the last one had (localStorage).

const PREFIX = "tokenmill-";

function read(name) {
  try {
    return sessionStorage.getItem(PREFIX + name) ?? localStorage.getItem(PREFIX + name);
  } catch {
    return null; // storage is switched off
  }
}

function write(name, value) {
  for (const storage of ["sessionStorage", "localStorage"]) {
    try {
      if (value) globalThis[storage].setItem(PREFIX + name, value);
      else globalThis[storage].removeItem(PREFIX + name);
    } catch {
      // Full or switched off: it lasts as long as the page.
    }
  }
}

// What is typed before a conversation has a message belongs to the next new one, whichever that is.
export const draftId = ({ id, messages }) => (messages.length ? id : "new");
const draftOf = (conversation) => `draft:${draftId(conversation)}`;

export const place = {
  openId: () => read("open"),
  setOpenId: (id) => write("open", id),
  draft: (conversation) => read(draftOf(conversation)) ?? "",
  setDraft: (conversation, text) => write(draftOf(conversation), text),
  settings() {
    try {
      return Object(JSON.parse(read("settings") ?? "{}"));
    } catch {
      return {};
    }
  },
  setSettings: (settings) => write("settings", JSON.stringify(settings)),
  // Pixels from the top; null: at the end.
  scroll(id) {
    const value = read(`scroll:${id}`);
    return value === null ? null : Number(value);
  },
  setScroll: (id, top) => write(`scroll:${id}`, top === null ? "" : String(Math.round(top))),
  forget(id) {
    for (const kind of ["draft", "scroll"]) write(`${kind}:${id}`, "");
  },
};
