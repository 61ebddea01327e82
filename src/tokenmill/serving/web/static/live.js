// The tab of the engines: one panel for each, fed by one stream, which is open only while somebody looks.

import { checked, events, key } from "./api.js";
import { EnginePanel } from "./engine_panel.js";
import { EngineView } from "./engine_view.js";
import { models, useModels } from "./models.js";
import { PlaybackBar, usePlayback } from "./playback.js";
import { openFile } from "./step_files.js";
import { Tabs } from "./tabs.js";
import { t } from "./texts.js";
import { FileButton, html, oncePerFrame, useLayoutEffect, useRef, useRedraw, useState } from "./ui.js";

const RETRY = 1000;
const ALL = "all";

export function Live({ isShown }) {
  const redraw = useRedraw();
  const views = useRef(new Map()).current;
  const [isPaused, pause] = useState(false);
  const [opened, setOpened] = useState(null);
  const [error, fail] = useState("");
  const [wanted, want] = useState({ model: "", engine: ALL });
  const version = useRef(0);
  const loaded = useModels().list.filter(({ state, parent }) => state === "ready" && !parent);
  const model = loaded.some(({ id }) => id === wanted.model) ? wanted.model : loaded[0]?.id ?? "";
  const isNone = models.areSeveral && !model;
  const draw = oncePerFrame(() => {
    version.current += 1;
    redraw();
  });
  // Before the page is drawn: a slow one would go on behind the word to pause.
  useLayoutEffect(() => {
    if (!isShown || isPaused || opened || isNone) return undefined;
    views.clear();
    return follow(views, models.path("live", model), draw, fail);
  }, [isShown, isPaused, opened, model, isNone]);
  const playback = usePlayback(opened, draw);
  const open = async (file) => {
    try {
      setOpened({ name: file.name, log: await openFile(file) });
      fail("");
    } catch (problem) {
      fail(`${file.name}: ${problem.message}`);
    }
  };
  const engines = isNone ? [] : [...views.values()].sort((one, other) => one.index - other.index);
  const isThere = engines.some(({ index }) => String(index) === wanted.engine);
  const shown = opened ? [playback.view] : engines.filter(({ index }) => !isThere || String(index) === wanted.engine);
  return html`<section class="live" hidden=${!isShown} aria-label=${t("tab.live")}>
    <div class="bar">
      ${opened ? html`<span class="model">${opened.name}</span>
          <button type="button" onClick=${() => setOpened(null)}>${t("live.back")}</button>`
        : html`<button type="button" aria-pressed=${isPaused} onClick=${() => pause(!isPaused)}>${isPaused ? t("live.goOn") : t("live.pause")}</button>
          <span class="hint">${isPaused ? t("live.isPaused") : t("live.often")}</span>
          ${loaded.length > 0 && html`<${Tabs} label=${t("live.models")} chosen=${model} choose=${(id) => want({ model: id, engine: ALL })}
            tabs=${loaded.map(({ id }) => [id, id])} />`}
          ${engines.length > 1 && html`<${Tabs} label=${t("live.engines")} chosen=${isThere ? wanted.engine : ALL}
            choose=${(engine) => want({ ...wanted, engine })} tabs=${[[ALL, t("live.all")],
              ...engines.map(({ index }) => [String(index), t("engine.title", { index })])]} />`}
          <span class="gap"></span>`}
      <${FileButton} label=${t("live.open")} accept="" onFile=${open} />
    </div>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${opened && html`<${PlaybackBar} playback=${playback} />`}
    <div class="engines">${shown.map((view) => html`<${EnginePanel} key=${`${opened?.name ?? model} ${view.index}`} view=${view}
      path=${(route) => models.path(route, model)} version=${version.current} />`)}
      ${!shown.length && !error && html`<p class="hint">${isNone ? t("live.noneLoaded") : t("live.waiting")}</p>`}</div>
  </section>`;
}

// Keeps a stream open until the function that it returns is called, and takes its frames in.
function follow(views, address, draw, fail) {
  let controller = null;
  let timer = 0;
  let isOver = false;
  async function run() {
    clearTimeout(timer);
    controller?.abort();
    if (isOver || document.hidden) return;
    const own = (controller = new AbortController());
    try {
      const reply = await checked(address, { signal: own.signal });
      fail("");
      for await (const data of events(reply)) {
        if (isOver) return;
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
  if (!frame.engine && frame.engine !== 0) return;
  if (!views.has(frame.engine)) views.set(frame.engine, new EngineView(frame.engine));
  views.get(frame.engine).take(frame);
}
