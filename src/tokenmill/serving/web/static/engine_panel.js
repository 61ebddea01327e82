// All that is shown of one engine.

import { Charts } from "./charts.js";
import { RequestPanel } from "./request_panel.js";
import { RequestTable } from "./request_table.js";
import { perfettoText, stepsText } from "./step_files.js";
import { number, parts, t } from "./texts.js";
import { Timeline, told } from "./timeline.js";
import { TreeMap } from "./tree_map.js";
import { download, html, useState } from "./ui.js";

const INKS = ["decode", "prefill", "draft", "schedule", "commit"];

export function EnginePanel({ view, path, version }) {
  const [shown, setWindow] = useState({ length: view.isFile ? Math.max(0.1, view.now - view.horizon) : 10, end: null });
  const [chosen, choose] = useState({});
  const { stats, ready } = view;
  const id = chosen.span?.id;
  const fact = (name, values) => html`<span>${parts(name, Object.fromEntries(Object.entries(values).map(([place, value]) =>
    [place, html`<b>${value}</b>`])))}</span>`;
  return html`<article class="engine" aria-label=${t("engine.title", { index: view.index })}>
    <header><h2>${t("engine.title", { index: view.index })}</h2>
      ${view.trouble && html`<p class="error" role="alert">${view.trouble}</p>`}
      ${stats && html`<p class="facts">${fact("facts.running", { count: stats.num_running })}${fact("facts.waiting", { count: stats.num_waiting })}
        ${fact("facts.rows", { used: stats.num_rows_used, all: ready?.max_num_seqs })}${fact("facts.preemptions", { count: stats.num_preemptions })}
        ${stats.num_draft_tokens > 0 && fact("facts.drafts", { share: `${number.format((100 * stats.num_accepted_tokens) / stats.num_draft_tokens)} %` })}</p>`}
      <span class="row">
        ${shown.end !== null && html`<button type="button" class="quiet" onClick=${() => setWindow({ ...shown, end: null })}>${t("engine.follow")}</button>`}
        <button type="button" class="quiet" disabled=${!view.turns.length}
          onClick=${() => download(`engine-${view.index}-steps.jsonl`, stepsText(view), "application/jsonl")}>${t("engine.steps")}</button>
        <button type="button" class="quiet" disabled=${!view.turns.length}
          onClick=${() => download(`engine-${view.index}-perfetto.json`, perfettoText(view))}>${t("engine.perfetto")}</button></span>
    </header>
    <p class="legend">${INKS.map((name) => html`<span class=${`ink-${name}`}>■ ${t(`part.${name}`)}</span> `)}
      <span class="ink-faint">■ ${t("part.run")}</span></p>
    <${Timeline} ...${{ view, version, window: shown, setWindow, choose }} chosen=${id} />
    ${chosen.turn && html`<section class="panel" aria-label=${t("engine.step")}><p>${told(chosen.turn)}</p></section>`}
    ${id && html`<${RequestPanel} key=${id} view=${view} id=${id} path=${path} close=${() => choose({})} />`}
    ${stats && html`<${Pool} stats=${stats} />`}
    ${!view.isFile && html`<${Charts} view=${view} version=${version} />`}
    <${RequestTable} view=${view} pick=${(span) => choose({ span })} />
    ${!view.isFile && html`<h3>${t("tree.title")}</h3><${TreeMap} nodes=${view.tree} version=${version}
      path=${(id) => path(`engines/${view.index}/prefixes/${id}`)} />`}
  </article>`;
}

function Pool({ stats }) {
  const free = stats.num_pages - stats.num_pages_pinned - stats.num_pages_evictable;
  const counts = [["pinned", stats.num_pages_pinned], ["evictable", stats.num_pages_evictable], ["free", free]];
  const text = t("pages.told", { counts: counts.map(([name, count]) => `${number.format(count)} ${t(`pages.${name}`)}`).join(", ") });
  return html`<div class="pool" role="img" aria-label=${text}>
    ${counts.map(([name, count]) => html`<span class=${`pages ${name}`} style=${{ flexGrow: count }}></span>`)}</div>
    <p class="hint">${text}</p>`;
}
