// What the page knows of one engine: turns of its loop, lives of requests, numbers over time. All of it is bounded, and
// the same whenever the page was opened: what began before the turns that the engine keeps, the engine tells.

// Places in the list that a turn comes as; see `LiveTurn` in core/live.py.
const FIELDS = ["number", "at", "schedule", "run", "commit", "brought", "waiting", "error", "preempted", "arrived",
  "ended", "step", "requests", "decode", "prefill", "draft", "newPages", "admitted", "chunks", "first"];
const REQUEST_FIELDS = ["id", "status", "row", "reason", "prompt", "output", "computed", "cached", "preemptions", "arrivedAt",
  "rowAt", "firstAt", "left", "deadline"];
const OWNER_FIELDS = ["id", "row", "since", "prompt", "arrived", "first"];
const SAMPLE_FIELDS = ["at", "running", "waiting", "pages", "pinned", "evictable", "queries", "hits", "prompts", "outputs"];
export const MOST_TURNS = 1000;
const MOST_LIVES = 4000;
const SECONDS_KEPT = 300;
// Samples may come together after a moment in which the server was busy: rates are over this many seconds at least.
const RATE_S = 0.2;
// A span that a turn tells of and one that the engine told of are the same if they began at the same time.
const SAME_S = 1e-6;

const named = (names, values) => Object.fromEntries(names.map((name, index) => [name, values[index]]));

export class EngineView {
  constructor(index) {
    this.index = index;
    this.ready = null;
    this.clear();
  }

  clear() {
    this.turns = [];
    this.lives = new Map();
    this.spans = []; // {row, id, from, to, end}: who had a row when
    this.open = new Map(); // id -> its span that has not ended
    this.started = new Set(); // requests that have had a token and wait for the next
    this.samples = [];
    this.requests = [];
    this.tree = [];
    this.stats = null;
    this.trouble = "";
    this.numRequests = 0;
    this.now = 0;
    this.horizon = 0; // when the first of the turns began
    this.lastEnd = 0;
    this.ttft = [];
    this.gaps = [];
  }

  take(frame) {
    if (frame.trouble) {
      this.trouble = frame.trouble;
      return;
    }
    if (frame.is_whole) {
      this.clear();
      for (const values of frame.owners ?? []) this.takeOwner(named(OWNER_FIELDS, values));
    }
    this.trouble = "";
    this.now = frame.now;
    this.numRequests = frame.num_requests;
    this.ready = frame.ready ?? this.ready;
    this.tree = frame.tree ?? this.tree;
    this.stats = frame.stats ?? this.stats;
    for (const values of frame.turns) this.takeTurn(named(FIELDS, values));
    for (const values of frame.samples ?? []) this.takeSample(named(SAMPLE_FIELDS, values));
    if (frame.requests && !frame.is_behind) this.takeRequests(frame.requests.map((values) => named(REQUEST_FIELDS, values)));
    this.trim(frame.kept_since ?? 0);
  }

  // One that had a row before the first turn.
  takeOwner({ id, row, since, prompt, arrived, first }) {
    Object.assign(this.life(id), { prompt, arrived, first });
    if (first) this.started.add(id);
    this.enter(id, row, since);
  }

  takeTurn(turn) {
    turn.end = turn.at + turn.schedule + turn.run + turn.commit;
    this.turns.push(turn);
    const hadStarted = this.started.size > 0;
    for (const [id, prompt] of turn.arrived) Object.assign(this.life(id), { prompt, arrived: turn.at });
    for (const id of turn.left ?? []) this.close(id, turn.at, "left");
    for (const id of turn.preempted) {
      this.close(id, turn.at, "preempted");
      this.note(id, turn.at, "preempted");
    }
    for (const [id, row, prompt, computed] of turn.admitted) {
      const life = this.life(id);
      life.prompt ||= prompt;
      this.note(id, turn.at, "admitted", { row, computed });
      const known = this.open.get(id);
      if (known?.row === row && Math.abs(known.from - turn.at) < SAME_S) continue;
      this.close(id, turn.at, "left");
      this.enter(id, row, turn.at);
    }
    for (const [id, tokens] of turn.chunks) this.note(id, turn.at, "ran", { tokens });
    for (const id of turn.first) this.takeFirst(id, turn);
    for (const [id, reason] of turn.ended) {
      this.close(id, turn.end, reason);
      this.note(id, turn.end, "ended", { reason });
      this.started.delete(id);
    }
    if (!turn.brought) return;
    if (this.lastEnd && hadStarted) this.gaps.push([turn.end, turn.end - this.lastEnd]);
    // While nobody waits for a next token there is no gap.
    this.lastEnd = this.started.size ? turn.end : 0;
  }

  takeFirst(id, turn) {
    const life = this.life(id);
    this.started.add(id);
    if (life.first) return;
    life.first = turn.end;
    this.note(id, turn.end, "first");
    if (life.arrived) this.ttft.push([turn.end, turn.end - life.arrived]);
  }

  takeRequests(requests) {
    this.requests = requests;
    for (const request of requests) {
      const { id, row, reason, prompt, arrivedAt, rowAt, firstAt } = request;
      const life = this.life(id);
      life.prompt ||= prompt;
      life.arrived ||= arrivedAt ?? 0;
      if (firstAt && !life.first) {
        life.first = firstAt;
        this.started.add(id);
      }
      if (row >= 0 && !this.open.has(id)) this.enter(id, row, rowAt || this.now);
      if (row < 0 && reason && reason !== life.reason) this.note(id, this.now, "waits", { reason });
      life.reason = reason;
    }
  }

  takeSample(sample) {
    const before = this.samples.findLast(({ at }) => at <= sample.at - RATE_S);
    const seconds = before ? sample.at - before.at : 0;
    const rate = (name) => (seconds > 0 ? Math.max(0, sample[name] - before[name]) / seconds : 0);
    const asked = before ? sample.queries - before.queries : 0;
    this.samples.push({ ...sample, free: sample.pages - sample.pinned - sample.evictable, outputRate: rate("outputs"),
      promptRate: rate("prompts"), hitShare: asked > 0 ? (sample.hits - before.hits) / asked : null });
  }

  life(id) {
    if (!this.lives.has(id)) this.lives.set(id, { id, prompt: 0, events: [], arrived: 0, first: 0 });
    return this.lives.get(id);
  }

  note(id, at, what, detail = {}) {
    const { events } = this.life(id);
    const last = events.at(-1);
    if (last?.what === what && JSON.stringify(last.detail) === JSON.stringify(detail)) {
      last.count += 1;
      last.until = at;
    } else if (events.length < 400) events.push({ at, until: at, what, detail, count: 1 });
  }

  enter(id, row, from) {
    const span = { row, id, from, to: Infinity, end: "" };
    this.open.set(id, span);
    this.spans.push(span);
  }

  close(id, to, end) {
    const span = this.open.get(id);
    if (!span) return;
    Object.assign(span, { to, end });
    this.open.delete(id);
  }

  // Forgets what the engine has forgotten, so that a page that was opened later shows the same.
  trim(keptSince) {
    const gone = this.turns.findIndex(({ at }) => at >= keptSince);
    if (gone !== 0) this.turns.splice(0, gone < 0 ? this.turns.length : gone);
    if (this.turns.length > MOST_TURNS) this.turns.splice(0, this.turns.length - MOST_TURNS);
    this.horizon = this.turns[0]?.at ?? keptSince;
    if (this.spans.some((span) => span.to < this.horizon)) this.spans = this.spans.filter((span) => span.to >= this.horizon);
    this.ttft = this.ttft.filter(([at]) => at >= this.horizon);
    this.gaps = this.gaps.filter(([at, length]) => at - length >= this.horizon);
    const old = this.samples.findIndex(({ at }) => at >= this.now - SECONDS_KEPT);
    if (old > 0) this.samples.splice(0, old);
    for (const id of this.lives.keys()) {
      if (this.lives.size <= MOST_LIVES) break;
      if (!this.open.has(id)) this.lives.delete(id);
    }
  }
}

export const seconds = (value) => (value < 1 ? `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`);
