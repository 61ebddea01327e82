// The life of one request: a line of what it did, and the same as a list with reasons.

import { getJson } from "./api.js";
import { seconds } from "./engine_view.js";
import { html, useEffect, useState } from "./ui.js";

export function RequestPanel({ view, id, close }) {
  const [now, setNow] = useState(null);
  const life = view.lives.get(id);
  const isOver = life?.events.some(({ what }) => what === "ended");
  useEffect(() => {
    setNow(null);
    if (isOver || view.isFile) return;
    getJson(`v1/requests/${encodeURIComponent(id)}`).then(({ requests }) => setNow(requests.find((one) => one.id === id) ?? null),
      () => setNow(null));
  }, [id, isOver]);
  if (!life) return null;
  const began = life.arrived || life.events[0]?.at || view.now;
  const phases = phasesOf(life, began, view);
  return html`<section class="panel" aria-label="Request">
    <header><h3>Request <code>${id}</code></h3><button type="button" class="quiet" onClick=${close}>Close</button></header>
    <div class="life">${phases.map(({ kind, from, to }) => html`<span class=${`phase ${kind}`} style=${{ flexGrow: to - from }}
      title=${`${kind}: ${seconds(to - from)}`}></span>`)}</div>
    <p class="hint">${phases.map(({ kind, from, to }) => `${kind} ${seconds(to - from)}`).join(" → ")}</p>
    <ol class="events">
      ${life.arrived > 0 && html`<li><b>0</b> arrived with ${life.prompt} prompt tokens</li>`}
      ${life.events.map(({ at, until, what, detail, count }) => html`<li><b>${seconds(Math.max(0, at - began))}</b>
        ${" "}${what}${detail ? `: ${detail}` : ""}${count > 1 ? ` (${count} times, until ${seconds(until - began)})` : ""}</li>`)}
    </ol>
    ${now && !isOver && html`<p class="hint">${toldByEngine(now)}</p>`}
  </section>`;
}

function phasesOf(life, began, view) {
  const phases = [];
  let kind = "waits";
  let from = began;
  const turnTo = (next, at) => {
    if (at > from) phases.push({ kind, from, to: at });
    kind = next;
    from = at;
  };
  const next = { admitted: "prefill", "first token": "decode", preempted: "preempted", ended: "" };
  for (const { what, at } of life.events) if (what in next) turnTo(next[what], at);
  if (kind) turnTo("", view.now);
  return phases;
}

function toldByEngine({ status, wait_reason: why, num_cached_tokens: cached, num_prompt_tokens: prompt, ...rest }) {
  return `When it was chosen the engine said: ${status}${why ? `, ${why}` : ""}; ${cached} of ${prompt} prompt tokens cached, ` +
    `${rest.num_output_tokens} tokens out, ${rest.num_preemptions} preemptions.`;
}
