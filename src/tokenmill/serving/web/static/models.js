// What is served: one model, or several that are loaded when they are needed; and the adapters of each.

import { checked, getJson, key } from "./api.js";
import { useEffect, useRedraw } from "./ui.js";

const EVERY_MS = 2000;
const AGAIN_MS = 5000;
const watchers = new Set();
let timer = 0;

export const models = {
  list: [], // entries of /v1/models, adapters with their `parent`
  error: "",
  // Only a server of several models says in which state each is.
  get areSeveral() {
    return this.list.some(({ state }) => state !== undefined);
  },
  get: (id) => models.list.find((one) => one.id === id),
  // The address of a route that one model's server answers.
  path: (route, id) => (models.areSeveral && id ? `${route}${route.includes("?") ? "&" : "?"}model=${encodeURIComponent(id)}` : route),
  load: (id) => steer(id, "load"),
  unload: (id) => steer(id, "unload"),
};

async function steer(id, verb) {
  try {
    await checked(`models/${encodeURIComponent(id)}/${verb}`, { method: "POST" });
    models.error = "";
  } catch (error) {
    models.error = error.message;
  }
  await read();
}

function tell() {
  for (const watcher of watchers) watcher();
}

async function read() {
  clearTimeout(timer);
  let next = AGAIN_MS;
  try {
    const { data } = await getJson("v1/models");
    const isNew = JSON.stringify(data) !== JSON.stringify(models.list);
    models.list = data;
    next = models.areSeveral ? EVERY_MS : 0;
    if (isNew) tell();
  } catch (error) {
    // A key is asked for, or the server is away: the first message says which.
    if (error.status === 401) next = 0;
  }
  clearTimeout(timer);
  if (next && watchers.size) timer = setTimeout(() => (document.hidden ? waitUntilSeen() : read()), next);
}

function waitUntilSeen() {
  document.addEventListener("visibilitychange", () => read(), { once: true });
}

key.watch((what) => what === "changed" && read());

// Draws a component again with each change of what is served.
export function useModels() {
  const redraw = useRedraw();
  useEffect(() => {
    watchers.add(redraw);
    if (watchers.size === 1 || !models.list.length) read();
    else redraw();
    return () => watchers.delete(redraw);
  }, []);
  return models;
}

export const refreshModels = read;

