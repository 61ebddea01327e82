// The way to the server: the key, errors as sentences, and streams of server-sent events.
// Paths have no slash before them: the page may lie below a proxy's prefix.

import { t } from "./texts.js";

const KEY = "tokenmill-key";
const watchers = new Set();

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

// The key lives as long as the tab does, and is sent in a header, never in an address.
export const key = {
  get: () => sessionStorage.getItem(KEY) || "",
  set(value) {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
    tell("changed");
  },
  // `watcher` is told "needed" when the server has refused a call, and "changed" when there is another key.
  watch(watcher) {
    watchers.add(watcher);
    return () => watchers.delete(watcher);
  },
};

function tell(what) {
  for (const watcher of watchers) watcher(what);
}

export async function call(path, { method = "GET", body, signal, text } = {}) {
  const headers = {};
  const given = key.get();
  if (given) headers.Authorization = `Bearer ${given}`;
  if (body !== undefined || text !== undefined) headers["Content-Type"] = "application/json";
  let reply;
  try {
    const content = text ?? (body === undefined ? undefined : JSON.stringify(body));
    reply = await fetch(path, { method, headers, body: content, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(t("error.unreachable"), 0);
  }
  if (reply.status !== 401) return reply;
  // Another key was given meanwhile: a late refusal of the former one asks for none.
  if (given !== key.get()) return call(path, { method, body, signal, text });
  tell("needed");
  return reply;
}

export async function checked(path, options) {
  const reply = await call(path, options);
  if (reply.ok) return reply;
  let message = `${reply.status} ${reply.statusText}`;
  try {
    message = (await reply.json()).error.message || message;
  } catch {
    // Not one of ours: a proxy's page, say.
  }
  throw new ApiError(message, reply.status);
}

export async function getJson(path, options) {
  return (await checked(path, options)).json();
}

// The data of each event of a reply, as text.
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n").filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } catch (error) {
    throw error instanceof TypeError ? new ApiError(t("error.line"), 0) : error;
  } finally {
    reader.cancel().catch(() => {});
  }
}
