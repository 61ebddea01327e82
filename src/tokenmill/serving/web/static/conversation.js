// A conversation is a tree of messages: whoever edits or asks again makes a branch, and nothing is lost.
// `messages` is a flat list with parents (null: a first message); `chosen` says which child of each is shown.

import { areFiles } from "./attachments.js";
import { arePassages } from "./documents.js";
import { t } from "./texts.js";

export function newConversation() {
  const now = Date.now();
  return { id: crypto.randomUUID?.() ?? String(now + Math.random()), title: "", created: now, updated: now,
    messages: [], chosen: {}, settings: {} };
}

export function add(conversation, parent, fields) {
  const message = { ...fields, id: nextId(conversation), parent };
  conversation.messages.push(message);
  choose(conversation, message);
  conversation.updated = Date.now();
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message.content);
  return message;
}

export function choose(conversation, message) {
  conversation.chosen[slot(message.parent)] = message.id;
}

export function siblings(conversation, message) {
  return conversation.messages.filter((other) => other.parent === message.parent);
}

// The messages that are shown, the first one first.
export function branch(conversation) {
  const children = new Map();
  for (const message of conversation.messages) {
    const key = slot(message.parent);
    if (!children.has(key)) children.set(key, []);
    children.get(key).push(message);
  }
  const shown = [];
  let parent = null;
  for (;;) {
    const choices = children.get(slot(parent));
    if (!choices) return shown;
    const chosen = conversation.chosen[slot(parent)];
    const message = choices.find((one) => one.id === chosen) ?? choices.at(-1);
    shown.push(message);
    parent = message.id;
  }
}

// Those before `message` on its branch.
export function ancestors(conversation, message) {
  const byId = new Map(conversation.messages.map((one) => [one.id, one]));
  const found = [];
  for (let id = message.parent; id !== null; id = byId.get(id).parent) found.unshift(byId.get(id));
  return found;
}

// What is shown and sent is an image, and no address that a browser would ask.
const isImage = (url) => typeof url === "string" && /^data:image\/[a-z+.-]+;base64,/.test(url);

const isList = (value) => value === undefined || Array.isArray(value);

// Takes in a conversation from a file. Throws where it is none.
export function imported(data) {
  const isText = (value) => typeof value === "string";
  const roles = ["user", "assistant", "tool"];
  if (!data || !isText(data.id) || !Array.isArray(data.messages)) throw new Error(t("file.noConversation"));
  const ids = new Set();
  for (const message of data.messages) {
    const follows = message.parent === null || ids.has(message.parent);
    if (!Number.isInteger(message.id) || ids.has(message.id) || !follows || !roles.includes(message.role) ||
      !isText(message.content) || ![message.images, message.calls, message.tokens, message.files].every(isList) ||
      !areFiles(message.files ?? []) || !arePassages(message.passages ?? []) ||
      !(message.images ?? []).every(isImage)) throw new Error(t("file.damaged"));
    ids.add(message.id);
  }
  const { title, created, chosen, settings } = data;
  // Nobody writes in a file.
  const messages = data.messages.map((one) => (one.state === "writing" ? { ...one, state: "stopped" } : one));
  return { ...newConversation(), title: String(title ?? ""), created: Number(created) || Date.now(), messages,
    chosen: Object(chosen), settings: Object(settings) };
}

function nextId(conversation) {
  return 1 + Math.max(0, ...conversation.messages.map((message) => message.id));
}

function slot(parent) {
  return parent === null ? "first" : String(parent);
}

function titleOf(text) {
  const line = text.trim().split("\n")[0];
  return line.length > 48 ? `${line.slice(0, 48)}…` : line;
}
