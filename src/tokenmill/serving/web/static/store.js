// Conversations, kept in this browser (IndexedDB). Where it refuses, they last as long as the page.
//
// Five tables: `conversations` whole, `heads` with what a list shows of them, and `parts`, the journal of answers that
// are being written: a long answer is not written anew with each of its pieces. A part says where it begins, so it may
// be taken in twice. The texts of `documents`, which a conversation searches, are written once; `drafts` are files of
// messages that are not sent yet.

import { number, t } from "./texts.js";

const NAME = "tokenmill";
const VERSION = 3;
const ALL = ["conversations", "heads", "parts", "documents", "drafts"];
// How long a deleted conversation can be had back.
export const KEPT_DELETED_MS = 3_600_000;

const memory = new Map();
const texts = new Map(); // the documents of those in memory
const unsent = new Map(); // and the drafts
const watchers = new Set();
const channel = new BroadcastChannel("tokenmill");
let opened;

channel.onmessage = ({ data }) => tellHere(data);

// Tells this page of a change, as another tab is told by itself.
export function tellHere(change) {
  for (const watcher of watchers) watcher(change);
}

// `watcher` is told {id, what} of each change that another tab makes (`kept`, `part`, `forgotten`), and {what: "blocked"}.
export function watchStore(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

function open() {
  opened ??= new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open(NAME, VERSION);
    } catch {
      resolve(null);
      return;
    }
    request.onupgradeneeded = ({ oldVersion }) => upgrade(request.result, request.transaction, oldVersion);
    request.onsuccess = () => {
      const database = request.result;
      // A newer page in another tab must not wait for this one.
      database.onversionchange = () => {
        database.close();
        opened = undefined;
      };
      resolve(database);
    };
    request.onerror = () => resolve(null);
    request.onblocked = () => tellHere({ what: "blocked" });
  });
  return opened;
}

function upgrade(database, transaction, oldVersion) {
  if (oldVersion < 1) database.createObjectStore("conversations", { keyPath: "id" });
  if (oldVersion < 3) {
    database.createObjectStore("documents", { keyPath: ["conversation", "id"] });
    database.createObjectStore("drafts", { keyPath: "id" });
  }
  if (oldVersion >= 2) return;
  const heads = database.createObjectStore("heads", { keyPath: "id" });
  database.createObjectStore("parts", { autoIncrement: true }).createIndex("conversation", "conversation");
  each(transaction.objectStore("conversations"), (conversation) => heads.put(headOf(conversation)));
}

function each(source, act, range) {
  source.openCursor(range).onsuccess = ({ target: { result: cursor } }) => {
    if (!cursor) return;
    act(cursor.value, cursor);
    cursor.continue();
  };
}

// Runs `act` in one transaction, with its tables by name; what it returns is a function that says the result.
async function run(mode, act) {
  const database = await open();
  if (!database) return undefined;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(ALL, mode);
    const result = act(Object.fromEntries(ALL.map((name) => [name, transaction.objectStore(name)])));
    transaction.oncomplete = () => resolve(result());
    transaction.onerror = transaction.onabort = () => reject(transaction.error ?? new Error(t("refused")));
  });
}

function headOf({ id, title, created, updated, messages, deleted = 0 }) {
  const isWriting = messages.some(({ state }) => state === "writing");
  return { id, title, created, updated, isWriting, deleted, count: messages.length };
}

// What a list shows of each, the newest first, the deleted ones included.
export async function allHeads() {
  const found = await run("readonly", ({ heads }) => {
    const request = heads.getAll();
    return () => request.result;
  });
  return (found ?? [...memory.values()].map(headOf)).sort((one, other) => other.updated - one.updated);
}

function takeIn(conversation, part) {
  const message = conversation.messages.find(({ id }) => id === part.message);
  if (message?.state !== "writing") return;
  message.content = message.content.slice(0, part.at.content) + part.content;
  message.reasoning = (message.reasoning ?? "").slice(0, part.at.reasoning) + part.reasoning;
  message.tokens = [...(message.tokens ?? []).slice(0, part.at.tokens), ...part.tokens];
  Object.assign(message, { calls: part.calls, count: part.count });
}

// A conversation with all that the journal has of it; undefined: there is no such one.
export async function load(id) {
  const found = await run("readonly", ({ conversations, parts }) => {
    const request = conversations.get(id);
    const journal = parts.index("conversation").getAll(IDBKeyRange.only(id));
    return () => ({ conversation: request.result, journal: journal.result });
  });
  if (!found) return memory.get(id);
  if (found.conversation) for (const part of found.journal) takeIn(found.conversation, part);
  return found.conversation;
}

// Keeps a conversation. Messages that another tab has added meanwhile stay.
export async function keep(conversation) {
  memory.set(conversation.id, conversation);
  await run("readwrite", ({ conversations, heads, parts }) => {
    conversations.get(conversation.id).onsuccess = ({ target: { result: before } }) => {
      const ids = new Set(conversation.messages.map(({ id }) => id));
      conversation.messages.push(...(before?.messages ?? []).filter(({ id }) => !ids.has(id)));
      conversations.put(conversation);
      const head = headOf(conversation);
      heads.put(head);
      if (!head.isWriting) clear(parts, conversation.id);
    };
    return () => undefined;
  });
  channel.postMessage({ id: conversation.id, what: "kept" });
}

function clear(parts, id) {
  each(parts.index("conversation"), (part, cursor) => cursor.delete(), IDBKeyRange.only(id));
}

// Writes a piece of an answer into the journal.
export async function note(part) {
  await run("readwrite", ({ parts }) => {
    parts.add(part);
    return () => undefined;
  });
  channel.postMessage({ id: part.conversation, what: "part" });
}

// Marks a conversation as deleted, or (0) takes that back.
export async function markDeleted(id, deleted) {
  const conversation = await load(id);
  if (conversation) await keep(Object.assign(conversation, { deleted }));
}

const ofConversation = (id) => IDBKeyRange.bound([id], [id, []]);

// Keeps the texts of documents of a conversation: {id, name, text, tokens}.
export async function keepDocuments(conversation, list) {
  texts.set(conversation, [...(texts.get(conversation) ?? []), ...list]);
  await run("readwrite", ({ documents }) => {
    for (const { id, name, text, tokens } of list) documents.put({ conversation, id, name, text, tokens });
    return () => undefined;
  });
}

export async function documentsOf(id) {
  const found = await run("readonly", ({ documents }) => {
    const request = documents.getAll(ofConversation(id));
    return () => request.result;
  });
  return found ?? texts.get(id) ?? [];
}

// Keeps what a message that is not sent yet brings besides words; `id`: of the conversation, or `new`.
export async function keepDraft(id, images, files) {
  unsent.set(id, { images: [...images], files: [...files] });
  await run("readwrite", ({ drafts }) => {
    if (images.length + files.length) drafts.put({ id, images, files });
    else drafts.delete(id);
    return () => undefined;
  });
}

export async function draftOf(id) {
  const found = await run("readonly", ({ drafts }) => {
    const request = drafts.get(id);
    return () => request.result;
  });
  return found ?? unsent.get(id) ?? { images: [], files: [] };
}

export async function forget(id) {
  memory.delete(id);
  texts.delete(id);
  await run("readwrite", ({ conversations, heads, parts, documents, drafts }) => {
    drafts.delete(id);
    conversations.delete(id);
    heads.delete(id);
    documents.delete(ofConversation(id));
    clear(parts, id);
    return () => undefined;
  });
  channel.postMessage({ id, what: "forgotten" });
}

// Calls `act` with each conversation that is not deleted, one after the other: together they may be large.
export async function eachConversation(act) {
  const taken = (conversation) => !conversation.deleted && act(conversation);
  const isThere = await run("readonly", ({ conversations }) => {
    each(conversations, taken);
    return () => true;
  });
  if (!isThere) for (const conversation of memory.values()) taken(conversation);
}

// A sentence about why something was not kept.
export async function whyNotKept(error) {
  if (error?.name !== "QuotaExceededError") return t("store.notKept", { error: error?.message ?? error });
  const { usage = 0, quota = 0 } = (await navigator.storage?.estimate?.()) ?? {};
  const megabytes = (bytes) => `${number.format(Math.round(bytes / 2 ** 20))} MB`;
  return t("store.full", { usage: megabytes(usage), quota: megabytes(quota) });
}
