// Answers that are being written: each is kept as it comes, and goes on after a reload, a line that broke, or a server
// that was away. One tab writes at a time in a conversation: it holds a lock, which the browser takes back with the tab.

import { bodyOf } from "./body.js";
import { ancestors } from "./conversation.js";
import { begin, generate } from "./generate.js";
import { keep, load, note, whyNotKept } from "./store.js";
import { t } from "./texts.js";

// The states of an answer, and what may follow. Messages of older pages have none: they are whole.
export const WRITING = "writing", WHOLE = "whole", STOPPED = "stopped", BROKEN = "broken";
const NEXT = { [WRITING]: [WRITING, WHOLE, STOPPED, BROKEN], [WHOLE]: [WRITING], [STOPPED]: [WRITING], [BROKEN]: [WRITING] };

const NOTE_EVERY_MS = 300;
const PAUSES_S = [1, 1, 2, 4, 8, 15];
// A server that is started anew loads its model first; beyond this somebody has to ask.
const MOST_TRIES = 60;
const SILENT_MS = 20_000;
// The server was not there, or is not ready: everything else it has said on purpose.
const PASSING = [0, 502, 503, 504];

export function move(message, state) {
  const from = message.state ?? WHOLE;
  if (!NEXT[from].includes(state)) throw new Error(`an answer that is ${from} cannot become ${state}`);
  message.state = state;
}

// Why an answer cannot go on from where it ended; empty: it can.
export function obstacle(message, settings) {
  if (message.calls?.length) return t("obstacle.call");
  if (settings.schema?.trim()) return t("obstacle.schema");
  if (!message.content.trim() && message.reasoning) return t("obstacle.thinking");
  return "";
}

// A server that cuts the prompt behind the text may drop white space there, and the model would write it twice.
function trim(message) {
  message.content = message.content.trimEnd();
  const text = message.tokens?.map(([one]) => one) ?? [];
  while (text.length && !text.at(-1).trim()) text.pop();
  message.tokens = message.tokens?.slice(0, text.length);
}

function bodyFor(one) {
  const { conversation, message } = one;
  const context = ancestors(conversation, message);
  if (!message.content.trim()) {
    begin(message);
    return bodyOf(message.settings, context, message.model);
  }
  if (!one.isExact) trim(message);
  one.isExact = false;
  return bodyOf(message.settings, context, message.model, message);
}

export class Answers {
  // conversation's id -> {conversation, message, attempt, isStopped, watchers}
  #running = new Map();
  // ids of conversations whose answer was stopped before it began
  #early = new Set();

  // `changed` hears of beginnings and ends, `fail` what went wrong, and `modelName` says which model is served.
  constructor(changed, fail, modelName) {
    Object.assign(this, { changed, fail, modelName });
    const wake = () => document.visibilityState === "visible" && this.#wake();
    addEventListener("online", () => this.#wake());
    document.addEventListener("visibilitychange", () => {
      wake();
      for (const one of this.#running.values()) one.flush?.();
    });
  }

  get(id) {
    return this.#running.get(id);
  }

  // Calls `draw` with each part of the answer that is written in a conversation.
  watch(id, draw) {
    const one = this.#running.get(id);
    one?.watchers.add(draw);
    return () => one?.watchers.delete(draw);
  }

  // Ends the answer of a conversation, also one that was asked for and has not begun.
  stop(id) {
    const one = this.#running.get(id);
    if (!one) {
      this.#early.add(id);
      return;
    }
    one.isStopped = true;
    one.attempt?.abort();
    one.wake?.();
  }

  // No answer begins in a conversation after all: a stop that came before is not for the next one.
  forgetStop(id) {
    this.#early.delete(id);
  }

  // Writes the answer that `make` adds to a conversation, or (`goesOn`) that it names; `isExact`: its text is not cut.
  // Returns false where another tab writes there.
  async write(conversation, make, { goesOn = false, isExact = false } = {}) {
    const work = async () => {
      await this.#run({ conversation, message: make(), isExact }, goesOn);
      return true;
    };
    if (!navigator.locks) return work();
    const isOurs = (lock) => {
      if (lock) return work();
      this.forgetStop(conversation.id);
      return false;
    };
    return navigator.locks.request(lockOf(conversation.id), { ifAvailable: true }, isOurs);
  }

  // Goes on with the answer of a conversation that a tab left unfinished, as soon as that tab is gone.
  async takeOver(id) {
    const work = async () => {
      const conversation = await load(id);
      const message = conversation?.messages.find(({ state }) => state === WRITING);
      if (!message || conversation.deleted) return;
      await this.#run({ conversation, message }, true);
    };
    await (navigator.locks ? navigator.locks.request(lockOf(id), work) : work());
  }

  #wake() {
    for (const one of this.#running.values()) {
      one.wake?.();
      const isSilent = one.heard && performance.now() - one.heard > SILENT_MS;
      if (isSilent) one.attempt?.abort("the line was silent");
    }
  }

  async #run(given, goesOn) {
    const { id } = given.conversation;
    const one = { isExact: false, isStopped: this.#early.delete(id), watchers: new Set(), ...given };
    this.#running.set(id, one);
    try {
      await this.#write(one, goesOn);
    } finally {
      this.#running.delete(id);
      this.changed(one.conversation);
    }
  }

  async #write(one, goesOn) {
    const { conversation, message } = one;
    const keepAll = () => keep(conversation).catch(async (error) => this.fail(await whyNotKept(error)));
    if (!goesOn) begin(message);
    move(message, WRITING);
    message.settings ??= { ...conversation.settings };
    const first = goesOn ? obstacle(message, message.settings) : "";
    if (first) {
      this.#break(message, new Error(t("answer.left")), first);
    } else {
      message.error = "";
      keepAll();
      this.changed(conversation);
      await this.#tryOften(one);
    }
    await keepAll();
  }

  async #tryOften(one) {
    const { message } = one;
    const journal = new Journal(one, (error) => this.fail(error));
    one.flush = () => journal.write();
    for (let tries = 0; tries < MOST_TRIES; tries += 1) {
      if (one.isStopped) return this.#stopped(message);
      one.attempt = new AbortController();
      const before = message.content.length + message.reasoning.length;
      try {
        message.model ||= this.modelName();
        const body = bodyFor(one);
        journal.rewind();
        await generate(message, body, one.attempt.signal, () => this.#heard(one, journal));
        move(message, WHOLE);
        return;
      } catch (error) {
        await journal.write();
        if (one.isStopped) return this.#stopped(message);
        if (message.content.length + message.reasoning.length > before) tries = 0;
        const why = obstacle(message, message.settings);
        const passes = PASSING.includes(error.status) || one.attempt.signal.aborted;
        if (!passes || why || tries + 1 >= MOST_TRIES) return this.#break(message, error, why);
        const seconds = PAUSES_S[Math.min(tries, PAUSES_S.length - 1)];
        message.waits = error.message ?? String(error);
        this.#tell(one);
        await Promise.race([new Promise((resolve) => { one.wake = resolve; }), pause(seconds)]);
      }
    }
  }

  #stopped(message) {
    message.finish = "stopped";
    message.waits = "";
    move(message, STOPPED);
  }

  #break(message, error, why) {
    message.waits = "";
    message.error = why && (message.reasoning || message.content || message.calls?.length)
      ? t("answer.broke", { error: error.message, why })
      : error.message;
    move(message, BROKEN);
  }

  #heard(one, journal) {
    one.heard = one.message.content || one.message.reasoning ? performance.now() : 0;
    one.message.waits = "";
    journal.changed();
    this.#tell(one);
  }

  #tell(one) {
    for (const watcher of one.watchers) watcher();
  }
}

const lockOf = (id) => `tokenmill-${id}`;
const pause = (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));

// What of an answer was not written down yet, at most a few times a second.
class Journal {
  #timer = 0;
  #at;

  constructor({ conversation, message }, fail) {
    Object.assign(this, { conversation, message, fail });
    this.#at = this.#place();
  }

  #place() {
    const { content, reasoning, tokens } = this.message;
    return { content: content.length, reasoning: reasoning.length, tokens: tokens?.length ?? 0 };
  }

  // The text was cut behind, or begins anew: so does what is written down.
  rewind() {
    const now = this.#place();
    this.#at = Object.fromEntries(Object.keys(now).map((name) => [name, Math.min(this.#at[name], now[name])]));
  }

  changed() {
    this.#timer ||= setTimeout(() => this.write(), NOTE_EVERY_MS);
  }

  async write() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const { message } = this;
    const at = this.#at;
    this.#at = this.#place();
    const part = { conversation: this.conversation.id, message: message.id, at, content: message.content.slice(at.content),
      reasoning: message.reasoning.slice(at.reasoning), tokens: (message.tokens ?? []).slice(at.tokens),
      calls: message.calls, count: message.count };
    await note(part).catch(async (error) => this.fail(await whyNotKept(error)));
  }
}
