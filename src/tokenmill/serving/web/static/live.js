// The tab of the engines: one panel for each, fed by one stream, which is open only while somebody looks.

import { checked, events, key } from "./api.js";
import { Charts } from "./charts.js";
import { EngineView, seconds } from "./engine_view.js";
import { RequestPanel } from "./request_panel.js";
import { openFile, perfettoText, stepsText } from "./step_files.js";
import { Timeline, told } from "./timeline.js";
import { TreeMap } from "./tree_map.js";
import { download, FileButton, html, number, oncePerFrame, useEffect, useRef, useRedraw, useState } from "./ui.js";

const RETRY = 1000;
const MOST_ROWS = 60;

export function Live({ isShown }) {
  const redraw = useRedraw();
  const views = useRef(new Map()).current;
  const [isPaused, pause] = useState(false);
  const [opened, setOpened] = useState(null);
  const [error, fail] = useState("");
  const version = useRef(0);
  useEffect(() => {
    if (!isShown || isPaused || opened) return undefined;
    const draw = oncePerFrame(() => {
      version.current += 1;
      redraw();
    });
    return follow(views, draw, fail);
  }, [isShown, isPaused, opened]);
  const open = async (file) => {
    try {
      setOpened({ name: file.name, view: await openFile(file) });
      fail("");
    } catch (problem) {
      fail(`${file.name}: ${problem.message}`);
    }
  };
  const shown = opened ? [opened.view] : [...views.values()].sort((one, other) => one.index - other.index);
  return html`<section class="live" hidden=${!isShown} aria-label="Live">
    <div class="bar">
      ${opened ? html`<span class="model">${opened.name}</span>
          <button type="button" onClick=${() => setOpened(null)}>Back to the engines</button>`
        : html`<button type="button" aria-pressed=${isPaused} onClick=${() => pause(!isPaused)}>${isPaused ? "Go on" : "Pause"}</button>
          <span class="hint">${isPaused ? "paused: the server is not asked" : "four times a second"}</span><span class="gap"></span>`}
      <${FileButton} label="Open a step log" accept="" onFile=${open} />
    </div>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <div class="engines">${shown.map((view) => html`<${EnginePanel} key=${(opened?.name ?? "") + view.index} view=${view}
      version=${version.current} />`)}
      ${!shown.length && !error && html`<p class="hint">Waiting for the engines…</p>`}</div>
  </section>`;
}

// Keeps a stream open until the function that it returns is called, and takes its frames in.
function follow(views, draw, fail) {
  let controller = null;
  let timer = 0;
  let isOver = false;
  async function run() {
    clearTimeout(timer);
    controller?.abort();
    if (isOver || document.hidden) return;
    const own = (controller = new AbortController());
    try {
      const reply = await checked("live", { signal: own.signal });
      fail("");
      for await (const data of events(reply)) {
        take(views, JSON.parse(data));
        draw();
      }
    } catch (problem) {
      if (own !== controller || problem.name === "AbortError") return;
      fail(problem.message);
      if (problem.status === 401) return;
    }
    if (own === controller && !isOver) timer = setTimeout(run, RETRY);
  }
  const onVisible = () => run();
  document.addEventListener("visibilitychange", onVisible);
  const leave = key.watch((what) => what === "changed" && run());
  run();
  return () => {
    isOver = true;
    clearTimeout(timer);
    controller?.abort();
    leave();
    document.removeEventListener("visibilitychange", onVisible);
  };
}

function take(views, frame) {
  if (frame.is_gone) {
    views.delete(frame.engine);
    return;
  }
  if (!views.has(frame.engine)) views.set(frame.engine, new EngineView(frame.engine));
  views.get(frame.engine).take(frame);
}

function EnginePanel({ view, version }) {
  const [shown, setWindow] = useState({ length: view.isFile ? Math.max(0.1, view.now - view.turns[0].at) : 10, end: view.isFile ? view.now : null });
  const [chosen, choose] = useState({});
  const { stats, ready } = view;
  const id = chosen.span?.id;
  const pick = (span) => choose({ span });
  return html`<article class="engine" aria-label=${`Engine ${view.index}`}>
    <header><h2>Engine ${view.index}</h2>
      ${view.trouble && html`<p class="error" role="alert">${view.trouble}</p>`}
      ${stats && html`<p class="facts"><span><b>${stats.num_running}</b> running</span><span><b>${stats.num_waiting}</b> waiting</span>
        <span><b>${stats.num_rows_used}</b> of ${ready?.max_num_seqs} rows</span><span><b>${stats.num_preemptions}</b> preemptions</span>
        ${stats.num_draft_tokens > 0 && html`<span><b>${number.format((100 * stats.num_accepted_tokens) / stats.num_draft_tokens)} %</b> of drafts kept</span>`}</p>`}
      <span class="row">
        ${shown.end !== null && !view.isFile && html`<button type="button" class="quiet" onClick=${() => setWindow({ ...shown, end: null })}>Follow</button>`}
        <button type="button" class="quiet" disabled=${!view.turns.length}
          onClick=${() => download(`engine-${view.index}-steps.jsonl`, stepsText(view), "application/jsonl")}>Download steps</button>
        <button type="button" class="quiet" disabled=${!view.turns.length}
          onClick=${() => download(`engine-${view.index}-perfetto.json`, perfettoText(view))}>For Perfetto</button></span>
    </header>
    <p class="legend">${["decode", "prefill", "draft", "schedule", "commit"].map((name) => html`<span class=${`ink-${name}`}>■ ${name}</span> `)}
      <span class="ink-faint">■ run</span></p>
    <${Timeline} ...${{ view, version, window: shown, setWindow, choose }} chosen=${id} />
    ${chosen.turn && html`<section class="panel" aria-label="Step"><p>${told(chosen.turn)}</p></section>`}
    ${id && html`<${RequestPanel} key=${id} view=${view} id=${id} close=${() => choose({})} />`}
    ${stats && html`<${Pool} stats=${stats} />`}
    ${!view.isFile && html`<${Charts} view=${view} version=${version} />
      <${Queue} view=${view} pick=${pick} />
      <h3>Cached prefixes</h3><${TreeMap} nodes=${view.tree} version=${version} />`}
  </article>`;
}

function Pool({ stats }) {
  const free = stats.num_pages - stats.num_pages_pinned - stats.num_pages_evictable;
  const parts = [["pinned", stats.num_pages_pinned], ["evictable", stats.num_pages_evictable], ["free", free]];
  return html`<div class="pool" role="img" aria-label=${parts.map(([name, count]) => `${count} pages ${name}`).join(", ")}>
    ${parts.map(([name, count]) => html`<span class=${`pages ${name}`} style=${{ flexGrow: count }}></span>`)}</div>
    <p class="hint">Pages: ${parts.map(([name, count]) => `${count.toLocaleString("en")} ${name}`).join(", ")}</p>`;
}

function Queue({ view, pick }) {
  const waiting = view.requests.filter(({ row }) => row < 0);
  const reasons = Object.entries(view.stats?.waiting_by_reason ?? {}).filter(([, count]) => count);
  return html`<h3>Queue <small>${reasons.map(([reason, count]) => `${count} for ${reason}`).join(", ") || "no request waits"}</small></h3>
    ${waiting.length > 0 && html`<div class="wide" tabindex="0" role="region" aria-label="Queue"><table><thead><tr><th>Request</th>
      <th>Prompt</th><th>Waited</th><th>Why</th></tr></thead><tbody>${waiting.slice(0, MOST_ROWS).map((request) => html`<tr key=${request.id}>
      <td><button type="button" class="quiet" onClick=${() => pick(request)}><code class="id">${request.id.slice(0, 8)}</code></button></td>
      <td>${request.prompt}</td><td>${waited(view, request)}</td><td>${why(request)}</td></tr>`)}
    </tbody></table></div>`}
    ${waiting.length > MOST_ROWS && html`<p class="hint">and ${view.numRequests - view.open.size - MOST_ROWS} more</p>`}`;
}

// The reason of one that was preempted says so only until it is looked at again.
function why({ status, reason }) {
  return status === "preempted" && !reason.startsWith("was preempted") ? `preempted; ${reason}` : reason;
}

function waited(view, { id }) {
  const arrived = view.lives.get(id)?.arrived;
  return arrived ? seconds(view.now - arrived) : "";
}
