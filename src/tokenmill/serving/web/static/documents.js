// Files that are too long to be sent whole: their texts are kept beside the conversation, and with each message go the
// passages that it is about. Which these were is kept with the message, so that whoever asks again sends the same.

import { checked } from "./api.js";
import { cut, Index, rank } from "./passages.js";
import { number, t } from "./texts.js";
import { html } from "./ui.js";

// Of files that are sent whole, together; and of the passages of one message. Both leave room for the talk.
const SHARE_WHOLE = 1 / 2;
const SHARE_PASSAGES = 1 / 4;
const MOST_PASSAGE_TOKENS = 2000;
// Of a model that does not say how much it can read.
const CONTEXT = 4096;
// How a text's tokens are counted: by those of its beginning; where the server is asked in vain, by bytes.
const SAMPLE = 20_000;
const BYTES_OF_A_TOKEN = 3;
const INDEXES_KEPT = 16;
const indexes = new Map(); // id -> promise

// How many tokens files may have that are sent whole, if no setting says it.
export const wholeTokens = ({ context }) => Math.floor((context || CONTEXT) * SHARE_WHOLE);

// About how many tokens a text is to a model that is there.
async function tokensOf(text, model) {
  if (model.state && model.state !== "ready") return estimate(text); // asking would load it
  const sample = text.slice(0, SAMPLE);
  try {
    const body = { model: model.name, prompt: sample, add_special_tokens: false };
    const { count } = await (await checked("tokenize", { method: "POST", body })).json();
    return Math.ceil((count * text.length) / Math.max(1, sample.length));
  } catch {
    return estimate(text);
  }
}

const estimate = (text) => Math.ceil(new TextEncoder().encode(text).length / BYTES_OF_A_TOKEN);

// A text file as it is sent: whole where it fits beside `others`, else as a document that is searched.
export async function fitted(file, others, model, settings) {
  const tokens = await tokensOf(file.text, model);
  const taken = others.filter(({ kind }) => kind === "text").reduce((sum, one) => sum + (one.tokens ?? estimate(one.text)), 0);
  const room = settings.fileTokens ?? wholeTokens(model);
  if (taken + tokens <= room) return { ...file, tokens };
  const id = crypto.randomUUID?.() ?? String(Date.now() + Math.random());
  const document = { ...file, kind: "document", id, tokens, count: cut(file.text).length };
  indexOf(document); // while somebody writes the question
  return document;
}

function indexOf({ id, text }) {
  const found = indexes.get(id) ?? Index.of(text);
  indexes.delete(id);
  indexes.set(id, found); // the last used is the last
  if (indexes.size > INDEXES_KEPT) indexes.delete(indexes.keys().next().value);
  return found;
}

// The passages that a question is about, as a message keeps them: {name, from, to, all, text}, `from` and `to` counted
// from 1, in the order of the texts. Where nothing of it is found: how the texts begin.
export async function passagesFor(question, documents, model) {
  const found = await Promise.all(documents.map(indexOf));
  const ranked = rank(found, question);
  const beginnings = documents.map((document, which) => ({ which, passage: 0 }));
  let room = Math.min(MOST_PASSAGE_TOKENS, (model.context || CONTEXT) * SHARE_PASSAGES);
  const chosen = [];
  for (const one of ranked.length ? ranked : beginnings) {
    const { tokens, text } = documents[one.which];
    const [from, to] = found[one.which].places[one.passage] ?? [0, 0];
    room -= ((to - from) * tokens) / text.length;
    if (room < 0 && chosen.length) break;
    if (to > from) chosen.push({ ...one, from, to });
  }
  chosen.sort((one, other) => one.which - other.which || one.passage - other.passage);
  return joined(chosen).map(({ which, first, last, from, to }) => ({ name: documents[which].name, from: first + 1, to: last + 1,
    all: found[which].places.length, text: documents[which].text.slice(from, to) }));
}

// Passages that follow each other as one.
function joined(chosen) {
  const parts = [];
  for (const { which, passage, from, to } of chosen) {
    const before = parts.at(-1);
    if (before?.which === which && before.last === passage - 1) Object.assign(before, { last: passage, to });
    else parts.push({ which, first: passage, last: passage, from, to });
  }
  return parts;
}

// Which passages an answer was given, folded.
export function Sources({ passages }) {
  return html`<details class="sources"><summary>${t("sources", { count: passages.length })}</summary>
    ${passages.map(({ name, from, to, all, text }, index) => html`<figure key=${index}>
      <figcaption>${t(from === to ? "sources.one" : "sources.place", { name, from: number.format(from), to: number.format(to), all: number.format(all) })}</figcaption>
      <pre tabindex="0">${text}</pre></figure>`)}</details>`;
}

const isText = (value) => typeof value === "string";
const isPlace = (value) => Number.isInteger(value) && value > 0;

// Whether what a file of conversations says of passages can be shown and sent.
export const arePassages = (passages) => Array.isArray(passages) && passages.every((one) => one && isText(one.name) && isText(one.text) &&
  [one.from, one.to, one.all].every(isPlace));

// The texts of the documents that a conversation in a file names. Throws where one is missing.
export function importedDocuments({ documents = [] }, conversation) {
  const isOne = (one) => one && isText(one.id) && isText(one.name) && isText(one.text) && one.tokens > 0;
  if (!Array.isArray(documents) || !documents.every(isOne)) throw new Error(t("file.damaged"));
  const ids = new Set(documents.map(({ id }) => id));
  const named = conversation.messages.flatMap(({ files = [] }) => files).filter(({ kind }) => kind === "document");
  if (!named.every(({ id }) => ids.has(id))) throw new Error(t("file.damaged"));
  return documents.map(({ id, name, text, tokens }) => ({ id, name, text, tokens }));
}
