// What can be done with conversations: the one that is open, and the list of them.

import { attachmentOf } from "./attachments.js";
import { Answers, BROKEN, STOPPED } from "./answers.js";
import { bodyOf } from "./body.js";
import { add, ancestors, branch, choose, imported, newConversation } from "./conversation.js";
import { fitted, importedDocuments, passagesFor } from "./documents.js";
import { draftId, place } from "./place.js";
import { allHeads, documentsOf, draftOf, eachConversation, forget, keep, keepDocuments, keepDraft, KEPT_DELETED_MS, load, markDeleted,
  watchStore, whyNotKept } from "./store.js";
import { t } from "./texts.js";
import { prefixBefore } from "./tokens.js";
import { download, oncePerFrame } from "./ui.js";

export class Desk {
  heads = [];
  open = { ...newConversation(), settings: place.settings() };
  error = "";
  images = [];
  files = [];
  removed = null; // the head of the conversation that was deleted last
  #taking = new Set();
  #asking = null;
  #draftRead;
  #drafting = new Promise((resolve) => { this.#draftRead = resolve; }); // until files of the draft are there

  constructor(redraw) {
    this.redraw = redraw;
    this.model = { name: "" };
    this.answers = new Answers((conversation) => this.#changed(conversation), (text) => this.fail(text),
      () => this.model.name);
    this.draft = place.draft(this.open);
    this.refresh = oncePerFrame(() => this.#list());
    this.reread = oncePerFrame(() => this.#reread());
  }

  // Reads what is kept, goes on with what was unfinished, and listens to other tabs until the page ends.
  async start() {
    watchStore(({ id, what }) => {
      if (what === "blocked") this.fail(t("desk.blocked"));
      else if (what !== "part") this.refresh();
      if (id === this.open.id && !this.answers.get(id)) this.reread();
    });
    const id = place.openId();
    const found = id && await load(id);
    const isShown = found && !found.deleted && !this.open.messages.length;
    const begun = this.#drafting;
    if (isShown) this.show(found);
    await (begun === this.#drafting ? this.#readDraft() : this.#drafting);
    this.#draftRead();
    await this.#list();
    const gone = this.heads.filter(({ deleted }) => deleted && deleted < Date.now() - KEPT_DELETED_MS);
    for (const head of gone) await forget(head.id);
    const last = this.heads.filter((head) => head.deleted && !gone.includes(head));
    this.removed = last.sort((one, other) => other.deleted - one.deleted)[0] ?? null;
    this.redraw();
  }

  async #list() {
    this.heads = await allHeads();
    for (const { id, isWriting, deleted } of this.heads) {
      if (!isWriting || deleted || this.answers.get(id) || this.#taking.has(id)) continue;
      this.#taking.add(id);
      this.answers.takeOver(id).catch((error) => this.fail(error.message)).finally(() => this.#taking.delete(id));
    }
    this.redraw();
  }

  async #reread() {
    const found = await load(this.open.id);
    if (!found || found.id !== this.open.id || this.answers.get(found.id)) return;
    this.open = found.deleted ? newConversation() : found;
    this.redraw();
  }

  #changed(conversation) {
    if (this.#asking === conversation) this.#asking = null;
    if (conversation?.id === this.open.id) this.open = conversation;
    if (conversation?.messages.at(-1)?.state === BROKEN) this.reloadModel?.(); // perhaps another is served by now
    this.refresh();
    this.redraw();
  }

  fail(text) {
    this.error = text;
    this.redraw();
  }

  // Whether an answer is being written: `here`, `elsewhere` (by another tab) or nowhere.
  get writes() {
    if (this.#asking === this.open || this.answers.get(this.open.id)) return "here";
    return this.open.messages.some(({ state }) => state === "writing") ? "elsewhere" : "";
  }

  #save(conversation = this.open) {
    if (conversation.messages.length) keep(conversation).catch(async (error) => this.fail(await whyNotKept(error)));
  }

  async #write(make, how, conversation = this.open) {
    try {
      bodyOf(conversation.settings, [], this.model.name); // refuses what is not JSON before anything is added
    } catch (error) {
      this.answers.forgetStop(conversation.id);
      this.fail(error.message);
      return false;
    }
    this.error = "";
    place.setOpenId(conversation.id);
    this.#asking = conversation; // until it is known whether another tab writes
    this.redraw();
    const isDone = await this.answers.write(conversation, make, how).finally(() => {
      this.#asking = null;
    });
    if (!isDone) this.fail(t("desk.elsewhere"));
    return isDone;
  }

  // Answers the message that `parent` names or adds, in the conversation that is open now or was when somebody asked.
  #answerTo(parent, conversation = this.open) {
    return this.#write(() => add(conversation, parent(conversation).id, { role: "assistant", content: "", model: this.model.name }),
      {}, conversation);
  }

  async send(text, images = [], files = []) {
    if (this.writes) return;
    const asked = this.open;
    const before = branch(asked);
    const found = await this.#prepared(asked, text, before, files);
    if (!found) return;
    this.#answerTo((conversation) => {
      this.#clearDraft(conversation);
      return add(conversation, before.at(-1)?.id ?? null, { role: "user", content: text, ...(images.length && { images }), ...found });
    }, asked);
    // Chromium decides by itself; other browsers would ask, and what they keep lasts long enough unasked.
    if (navigator.userAgentData) navigator.storage?.persist?.().catch(() => {});
  }

  // The files of a message as it keeps them, and of the documents up to there the passages that it is about; null: the
  // browser does not keep them.
  async #prepared(conversation, text, before, files) {
    const isLong = ({ kind }) => kind === "document";
    const named = [...before.flatMap((message) => message.files ?? []), ...files].filter(isLong).map(({ id }) => id);
    if (!named.length) return files.length ? { files } : {};
    this.#asking = conversation;
    this.redraw();
    try {
      const added = files.filter((one) => isLong(one) && one.text !== undefined);
      if (added.length) await keepDocuments(conversation.id, added);
      const documents = (await documentsOf(conversation.id)).filter(({ id }) => named.includes(id));
      const kept = files.map((one) => (isLong(one) ? { kind: one.kind, id: one.id, name: one.name, count: one.count } : one));
      return { passages: await passagesFor(text, documents, this.model), ...(kept.length && { files: kept }) };
    } catch (error) {
      this.answers.forgetStop(conversation.id);
      this.fail(await whyNotKept(error));
      return null;
    } finally {
      this.#asking = null;
    }
  }

  give(calls, results) {
    this.#answerTo((conversation) => {
      let parent = branch(conversation).at(-1);
      calls.forEach(({ id, name }, index) => {
        parent = add(conversation, parent.id, { role: "tool", name, callId: id, content: results[index] ?? "" });
      });
      return parent;
    });
  }

  async edit(message, text) {
    const { state, finish, usage, seconds, error, passages, ...rest } = message;
    const asked = this.open;
    const isQuestion = message.role === "user";
    const found = isQuestion ? await this.#prepared(asked, text, ancestors(asked, message), message.files ?? []) : {};
    if (!found) return;
    const copy = add(asked, message.parent, { ...rest, ...found, content: text, tokens: [], count: 0 });
    this.#save(asked);
    this.redraw();
    if (isQuestion) this.#answerTo(() => copy, asked);
  }

  again(message) {
    this.#answerTo(({ messages }) => messages.find(({ id }) => id === message.parent));
  }

  // Goes on with an answer that ended, was stopped or edited, by the settings of now.
  goOn(message) {
    Object.assign(message, { since: message.count ?? 0, settings: { ...this.open.settings }, model: this.model.name });
    this.#write(() => message, { goesOn: true });
  }

  // Another answer, the same up to its token `index`, and from there on with another one.
  branchAt(message, index, choice) {
    const before = prefixBefore(message, index);
    if (before === null) {
      this.fail(t("desk.noBranch"));
      return;
    }
    const [, , top] = message.tokens[index];
    const tokens = [...message.tokens.slice(0, index), [...choice, top]];
    const fields = { role: "assistant", content: before + choice[0], reasoning: message.reasoning, tokens, calls: [],
      model: this.model.name, count: index + 1, settings: { ...this.open.settings } };
    const conversation = this.open;
    this.#write(() => add(conversation, message.parent, fields), { goesOn: true, isExact: true });
  }

  choose(message) {
    choose(this.open, message);
    this.#save();
    this.redraw();
  }

  set(settings) {
    this.open.settings = settings;
    place.setSettings(settings);
    this.#save();
    this.redraw();
  }

  setDraft(text) {
    this.draft = text;
    place.setDraft(this.open, text);
    this.redraw();
  }

  // What is not sent yet goes with the conversation that it was written in.
  #clearDraft(conversation) {
    if (conversation === this.open) Object.assign(this, { draft: "", images: [], files: [] });
    place.setDraft(conversation, "");
    keepDraft(draftId(conversation), [], []).catch(() => {});
  }

  async #readDraft() {
    const conversation = this.open;
    const { images, files } = await draftOf(draftId(conversation)).catch(() => ({ images: [], files: [] }));
    if (this.open !== conversation || !images.length && !files.length) return;
    Object.assign(this, { images, files });
    this.redraw();
  }

  #filesChanged() {
    keepDraft(draftId(this.open), this.images, this.files).catch(async (error) => this.fail(await whyNotKept(error)));
    this.redraw();
  }

  removeFile(list, index) {
    list.splice(index, 1);
    this.#filesChanged();
  }

  show(conversation) {
    const isAnother = conversation.id !== this.open.id;
    this.open = conversation;
    if (isAnother) {
      Object.assign(this, { images: [], files: [] });
      this.#drafting = this.#readDraft();
    }
    this.error = "";
    this.draft = place.draft(conversation);
    place.setOpenId(conversation.id);
    this.redraw();
  }

  async openHead({ id }) {
    const found = this.answers.get(id)?.conversation ?? (await load(id));
    if (found) this.show(found);
  }

  begin() {
    this.show({ ...newConversation(), settings: { ...this.open.settings } });
  }

  async rename({ id }, title) {
    const found = this.#known(id) ?? (await load(id));
    if (!found || !title.trim()) return;
    found.title = title.trim();
    await keep(found).catch(async (error) => this.fail(await whyNotKept(error)));
    this.refresh();
  }

  #known(id) {
    return this.answers.get(id)?.conversation ?? (this.open.id === id ? this.open : undefined);
  }

  async remove(head) {
    const known = this.#known(head.id);
    const deleted = Date.now();
    if (known) known.deleted = deleted;
    this.answers.stop(head.id);
    await markDeleted(head.id, deleted);
    if (this.open.id === head.id) this.begin();
    await this.#list();
    // Behind the list: the way back takes the focus of the button that is gone.
    this.removed = { ...head, deleted };
    this.redraw();
  }

  async restore() {
    const { id } = this.removed;
    this.removed = null;
    await markDeleted(id, 0);
    await this.openHead({ id });
    await this.#list();
  }

  dismiss() {
    this.removed = null;
    this.redraw();
  }

  // Those whose title or messages hold a text, as ids.
  async search(text) {
    const wanted = text.toLowerCase();
    const found = new Set();
    await eachConversation(({ id, title, messages }) => {
      if ([title, ...messages.map(({ content }) => content)].some((one) => one.toLowerCase().includes(wanted))) found.add(id);
    });
    return found;
  }

  async exportAll() {
    const texts = [];
    for (const { id } of this.heads.filter(({ deleted }) => !deleted)) {
      const documents = await documentsOf(id);
      texts.push(JSON.stringify({ ...(await load(id)), ...(documents.length && { documents }) }, null, 1));
    }
    download("conversations.json", `[${texts.join(",\n")}]`);
  }

  async take(file) {
    try {
      const data = JSON.parse(await file.text());
      const given = Array.isArray(data) ? data : [data];
      const found = given.map(imported);
      const documents = found.map((conversation, index) => importedDocuments(given[index], conversation));
      for (const [index, conversation] of found.entries()) {
        if (documents[index].length) await keepDocuments(conversation.id, documents[index]);
        await keep(conversation);
      }
      this.error = "";
      if (found.length) this.show(found[0]);
    } catch (error) {
      this.fail(`${file.name}: ${error.name === "QuotaExceededError" ? await whyNotKept(error) : error.message}`);
    }
    await this.#list();
  }

  async addFiles(files) {
    this.error = "";
    await this.#drafting;
    for (const file of files) {
      try {
        const found = await attachmentOf(file, this.model);
        if (found.kind === "image") this.images.push(found.url);
        else if (found.kind === "text") this.files.push(await fitted(found, this.#filesSoFar(), this.model, this.open.settings));
        else this.files.push(found);
      } catch (error) {
        this.error = error.message;
      }
    }
    this.#filesChanged();
  }

  #filesSoFar() {
    return [...branch(this.open).flatMap(({ files = [] }) => files), ...this.files];
  }

  // Which model answers from now on in this conversation and in new ones.
  useModel(id) {
    this.set({ ...this.open.settings, model: id });
  }

  request() {
    const shown = branch(this.open);
    return bodyOf(this.open.settings, shown.at(-1)?.role === "assistant" ? shown.slice(0, -1) : shown, this.model.name);
  }

  stop() {
    if (this.writes === "here") this.answers.stop(this.open.id);
  }
}

export const canGoOn = ({ state, content, calls }) => content.trim() !== "" && !calls?.length ||
  state === BROKEN || state === STOPPED;
