// What the page knows of one engine: turns of its loop, lives of requests, numbers over time. All of it is bounded.

// Places in the list that a turn comes as; see `LiveTurn` in core/live.py.
const FIELDS = ["number", "at", "schedule", "run", "commit", "brought", "waiting", "error", "preempted", "arrived",
  "ended", "step", "requests", "decode", "prefill", "draft", "newPages", "admitted", "chunks", "first"];
const REQUEST_FIELDS = ["id", "status", "row", "reason", "prompt", "output", "computed", "cached", "preemptions"];
export const MOST_TURNS = 1000;
const MOST_LIVES = 4000;
const MOST_SAMPLES = 1200;

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
    this.samples = [];
    this.requests = [];
    this.tree = [];
    this.stats = null;
    this.trouble = "";
    this.numRequests = 0;
    this.now = 0;
    this.lastEnd = 0;
    this.ttft = [];
    this.gaps = [];
  }

  take(frame) {
    if (frame.trouble) {
      this.trouble = frame.trouble;
      return;
    }
    if (frame.is_whole) this.clear();
    this.trouble = "";
    this.now = frame.now;
    this.numRequests = frame.num_requests;
    this.ready = frame.ready ?? this.ready;
    this.tree = frame.tree ?? this.tree;
    for (const values of frame.turns) this.takeTurn(named(FIELDS, values));
    if (frame.requests) this.takeRequests(frame.requests.map((values) => named(REQUEST_FIELDS, values)));
    if (frame.stats) this.takeStats(frame.stats);
    this.trim();
  }

  takeTurn(turn) {
    turn.end = turn.at + turn.schedule + turn.run + turn.commit;
    this.turns.push(turn);
    const hadRequests = this.open.size > 0;
    for (const [id, prompt] of turn.arrived) this.lives.set(id, { id, prompt, events: [], arrived: turn.at });
    for (const id of turn.preempted) {
      this.close(id, turn.at, "preempted");
      this.note(id, turn.at, "preempted");
    }
    for (const [id, row, prompt, computed] of turn.admitted) {
      const life = this.life(id);
      life.prompt ||= prompt;
      this.note(id, turn.at, "admitted", `row ${row}, ${computed} tokens cached`);
      this.close(id, turn.at, "left");
      this.enter(id, row, turn.at);
    }
    for (const [id, tokens] of turn.chunks) this.note(id, turn.at, "ran", `${tokens} tokens`);
    for (const id of turn.first) this.takeFirst(id, turn);
    for (const [id, reason] of turn.ended) {
      this.close(id, turn.end, reason);
      this.note(id, turn.end, "ended", reason);
    }
    if (turn.brought) {
      if (this.lastEnd && hadRequests) this.gaps.push([turn.end, turn.end - this.lastEnd]);
      this.lastEnd = turn.end;
    }
  }

  takeFirst(id, turn) {
    const life = this.life(id);
    if (life.first) return;
    life.first = turn.end;
    this.note(id, turn.end, "first token");
    if (life.arrived) this.ttft.push([turn.end, turn.end - life.arrived]);
  }

  takeRequests(requests) {
    this.requests = requests;
    for (const request of requests) {
      const life = this.life(request.id);
      life.prompt ||= request.prompt;
      if (request.row >= 0 && !this.open.has(request.id)) this.enter(request.id, request.row, this.turns[0]?.at ?? this.now);
      if (request.row < 0 && request.reason && request.reason !== life.reason) {
        this.note(request.id, this.now, "waits", request.reason);
      }
      life.reason = request.reason;
    }
  }

  takeStats(stats) {
    const before = this.samples.at(-1);
    const seconds = before ? this.now - before.at : 0;
    const rate = (name) => (seconds > 0 ? Math.max(0, stats[name] - before.stats[name]) / seconds : 0);
    const asked = before ? stats.prefix_queries - before.stats.prefix_queries : 0;
    this.stats = stats;
    this.samples.push({
      at: this.now, stats, tokens: rate("generation_tokens"), prompts: rate("prompt_tokens"),
      hits: asked > 0 ? (stats.prefix_hits - before.stats.prefix_hits) / asked : null,
      free: stats.num_pages - stats.num_pages_pinned - stats.num_pages_evictable,
    });
  }

  life(id) {
    if (!this.lives.has(id)) this.lives.set(id, { id, prompt: 0, events: [], arrived: 0 });
    return this.lives.get(id);
  }

  note(id, at, what, detail = "") {
    const { events } = this.life(id);
    const last = events.at(-1);
    if (last?.what === what && last.detail === detail) {
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

  trim() {
    if (this.turns.length > MOST_TURNS) this.turns.splice(0, this.turns.length - MOST_TURNS);
    const from = this.turns[0]?.at ?? 0;
    if (this.spans.some((span) => span.to < from)) this.spans = this.spans.filter((span) => span.to >= from);
    for (const list of [this.samples, this.ttft, this.gaps]) {
      if (list.length > MOST_SAMPLES) list.splice(0, list.length - MOST_SAMPLES);
    }
    for (const id of this.lives.keys()) {
      if (this.lives.size <= MOST_LIVES) break;
      if (!this.open.has(id)) this.lives.delete(id);
    }
  }
}

export const seconds = (value) => (value < 1 ? `${(value * 1000).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`);
