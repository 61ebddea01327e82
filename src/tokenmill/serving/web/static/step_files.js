// Steps as files: what was seen here, as lines of JSON that this page opens again; the same for Perfetto; and step logs
// that a server wrote with --step-log.

import { EngineView } from "./engine_view.js";
import { t } from "./texts.js";

const FORMAT = "tokenmill-live-1";
const PARTS = ["schedule", "run", "commit"];

export function stepsText(view) {
  const head = { format: FORMAT, engine: view.index, ready: view.ready };
  return [head, ...view.turns].map((one) => JSON.stringify(one)).join("\n");
}

// Trace events as Perfetto and Chrome read them: times in microseconds.
export function perfettoText(view) {
  const zero = view.turns[0]?.at ?? 0;
  const micro = (value) => Math.round(value * 1e9) / 1e3;
  const pid = view.index + 1;
  const events = [{ ph: "M", pid, name: "process_name", args: { name: `engine ${view.index}` } },
    { ph: "M", pid, tid: 0, name: "thread_name", args: { name: "steps" } }];
  for (const turn of view.turns) {
    const ts = micro(turn.at - zero);
    const { step, requests, decode, prefill, draft, waiting, error } = turn;
    events.push({ ph: "X", pid, tid: 0, ts, dur: micro(turn.end - turn.at), name: step ? `step ${step}` : "turn without a step",
      args: { requests, decode, prefill, draft, waiting, error } });
    let from = turn.at - zero;
    for (const part of PARTS) {
      events.push({ ph: "X", pid, tid: 0, ts: micro(from), dur: micro(turn[part]), name: part });
      from += turn[part];
    }
    events.push({ ph: "C", pid, ts, name: "tokens", args: { decode, prefill, draft } });
  }
  for (const { row, id, from, to, end } of view.spans) {
    events.push({ ph: "X", pid, tid: row + 1, ts: micro(from - zero), dur: micro(Math.min(to, view.now) - from), name: id,
      args: { end } });
  }
  return JSON.stringify({ displayTimeUnit: "ms", traceEvents: events });
}

// The turns that a file holds, and what the engine was. Throws where it is neither kind.
export async function openFile(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const log = bytes[0] === 0x7b ? readLines(new TextDecoder().decode(bytes)) : readStepLog(bytes);
  if (!log.turns.length) throw new Error(t("file.empty"));
  return log;
}

function readLines(text) {
  const [head, ...turns] = text.split("\n").filter(Boolean).map((line) => JSON.parse(line));
  if (head.format !== FORMAT) throw new Error(t("file.noSteps"));
  return { ready: head.ready, turns };
}

// Each record is msgpack with its length before it, in four bytes. There is no time of day in it: steps follow each other.
function readStepLog(bytes) {
  const view = new EngineView(0); // who has a row while the log is read
  const data = new DataView(bytes.buffer);
  let place = 0;
  let at = 0;
  let number = 0;
  while (place + 4 <= bytes.length) {
    const length = data.getUint32(place);
    if (place + 4 + length > bytes.length) break; // the engine was killed while it wrote
    const record = globalThis.MessagePack.decode(bytes.subarray(place + 4, place + 4 + length));
    place += 4 + length;
    if (number === 0) {
      if (!record.scheduler) throw new Error(t("file.noLog"));
      view.ready = { num_pages: record.num_pages, page_size: record.page_size };
    } else at += takeRecord(view, record, number, at);
    number += 1;
  }
  return { ready: view.ready, turns: view.turns };
}

// The seconds of a record, after it was taken in.
function takeRecord(view, record, number, at) {
  const [schedule, run, commit] = record.seconds;
  const { events: inputs = [], plan, waiting = "", error = "", token_ids: ids = [], rest = 0 } = record;
  const turn = { number, at: at + rest, schedule, run, commit, waiting, error, brought: ids.length, preempted: [], left: [], ended: [], first: [],
    chunks: [], admitted: [], step: 0, requests: 0, decode: 0, prefill: 0, draft: 0, newPages: 0,
    arrived: inputs.filter(({ type }) => type === "Added").map(({ message }) => [message.id, message.prompt_token_ids.length]) };
  for (const { type, ids: gone } of inputs) if (type === "Aborted") for (const id of gone) turn.ended.push([id, "abort"]);
  if (plan) takePlan(view, turn, plan);
  view.takeTurn(turn);
  return rest + schedule + run + commit;
}

function takePlan(view, turn, plan) {
  const admitted = new Map(plan.new_rows.map((row) => [row.request_id, row]));
  // A log does not say who ended: whose row another takes had left it; who comes back was preempted.
  for (const { row, request_id: id } of plan.new_rows) {
    if (view.open.has(id)) turn.preempted.push(id);
    for (const [other, span] of view.open) if (span.row === row && other !== id) turn.left.push(other);
  }
  Object.assign(turn, { step: plan.step, requests: plan.request_ids.length, newPages: plan.page_ids.length });
  plan.request_ids.forEach((id, index) => {
    const draft = Math.max(0, plan.num_samples[index] - 1);
    const own = plan.num_scheduled[index] - draft;
    turn.draft += draft;
    if (own === 1 && !admitted.has(id)) turn.decode += 1;
    else {
      turn.prefill += own;
      turn.chunks.push([id, own]);
    }
    const prompt = admitted.get(id)?.num_prompt_tokens ?? view.lives.get(id)?.prompt;
    if (plan.num_samples[index] > 0 && plan.num_computed[index] + own === prompt) turn.first.push(id);
    if (admitted.has(id)) turn.admitted.push([id, admitted.get(id).row, prompt, plan.num_computed[index]]);
  });
}
