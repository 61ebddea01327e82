// The life of one request: a line of what it did, and the same as a list with reasons.

import { getJson } from "./api.js";
import { seconds } from "./engine_view.js";
import { t } from "./texts.js";
import { html, useEffect, useState } from "./ui.js";

export function RequestPanel({ view, id, path, close }) {
  const [now, setNow] = useState(null);
  const life = view.lives.get(id);
  const isOver = life?.events.some(({ what }) => what === "ended");
  useEffect(() => {
    setNow(null);
    if (isOver || view.isFile) return;
    getJson(path(`v1/requests/${encodeURIComponent(id)}`)).then(({ requests }) => setNow(requests.find((one) => one.id === id) ?? null),
      () => setNow(null));
  }, [id, isOver]);
  if (!life) return null;
  const events = eventsOf(life, view);
  const began = life.arrived || events[0]?.at || view.now;
  const phases = phasesOf(events, began, view).map((phase) => ({ ...phase, name: t(`phase.${phase.kind}`) }));
  return html`<section class="panel" aria-label=${t("request.label")}>
    <header><h3>${t("request.title")} <code>${id}</code></h3><button type="button" class="quiet" onClick=${close}>${t("close")}</button></header>
    <div class="life">${phases.map(({ kind, name, from, to }) => html`<span class=${`phase ${kind}`} style=${{ flexGrow: to - from }}
      title=${`${name}: ${seconds(to - from)}`}></span>`)}</div>
    <p class="hint">${phases.map(({ name, from, to }) => `${name} ${seconds(to - from)}`).join(" → ")}</p>
    <ol class="events">
      ${life.arrived > 0 && html`<li><b>0</b> ${t("request.arrived", { prompt: life.prompt })}</li>`}
      ${events.map(({ at, until, what, detail, count }) => html`<li><b>${seconds(Math.max(0, at - began))}</b>
        ${" "}${t(`request.${what}`, told(detail))}${count > 1 ? ` ${t("request.often", { count, until: seconds(until - began) })}` : ""}</li>`)}
    </ol>
    ${now && !isOver && html`<p class="hint">${toldByEngine(now)}</p>`}
  </section>`;
}

const told = ({ reason, ...rest }) => ({ ...rest, ...(reason !== undefined && { reason: ENDS.includes(reason) ? t(`end.${reason}`) : reason }) });
const ENDS = ["stop", "length", "abort", "error", "left", "preempted"];

// Those of the steps that are kept. Of what was before, two times are known: see `takeOwner`.
function eventsOf({ id, first, events }, { horizon, spans }) {
  const own = spans.find((span) => span.id === id && span.from < horizon);
  const before = own ? [{ at: own.from, until: own.from, what: "owned", detail: { row: own.row }, count: 1 }] : [];
  if (first && first < horizon) before.push({ at: first, until: first, what: "first", detail: {}, count: 1 });
  return [...before, ...events.filter(({ until }) => until >= horizon)];
}

function phasesOf(events, began, view) {
  const phases = [];
  let kind = "waits";
  let from = began;
  const turnTo = (next, at) => {
    if (at > from) phases.push({ kind, from, to: at });
    kind = next;
    from = at;
  };
  const next = { owned: "prefill", admitted: "prefill", first: "decode", preempted: "preempted", ended: "" };
  for (const { what, at } of events) if (what in next) turnTo(next[what], at);
  if (kind) turnTo("", view.now);
  return phases;
}

function toldByEngine({ status, wait_reason: why, num_cached_tokens: cached, num_prompt_tokens: prompt, ...rest }) {
  return t("request.told", { status: why ? `${status}, ${why}` : status, cached, prompt, output: rest.num_output_tokens,
    preemptions: rest.num_preemptions });
}
