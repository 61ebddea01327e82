// One stream of an answer: asks for it, and adds to a message as its parts come.

import { ApiError, checked, events } from "./api.js";
import { t } from "./texts.js";
import { breath } from "./ui.js";

// What a message may keep of its tokens: a long answer must not fill the browser's store.
const MOST_TOKENS = 4096;
// Parts within a millisecond were read together, by a page or a line that was busy. With fewer moments than these, the
// time between the first and the last says how fast the page reads.
const FEWEST_MOMENTS = 8;
// The types of errors within a stream that say nothing against the request: another try may end well.
const ENDING = ["server_stopping", "server_busy"];
// Much may come at once; after so long the page may draw and hear before the rest.
const BREATH_MS = 10;

// Makes a message one whose answer begins.
export function begin(message) {
  Object.assign(message, { content: "", reasoning: "", calls: [], tokens: [], error: "", finish: "", usage: null, count: 0 });
}

// Adds what the server answers to `message`, and calls `changed` after each part. Throws where the stream breaks off.
export async function generate(message, body, signal, changed) {
  const started = performance.now();
  const marks = { first: 0, last: 0, moments: 0, before: message.count ?? 0 };
  const asked = { ...body, return_progress: true };
  message.finish = "";
  let rested = started;
  try {
    const reply = await checked("v1/chat/completions", { method: "POST", body: asked, signal });
    for await (const data of events(reply)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, ENDING.includes(chunk.error.type) ? 503 : 500);
      message.progress = chunk.choices?.length ? null : chunk.prompt_progress ?? message.progress;
      for (const choice of chunk.choices ?? []) take(message, choice, marks);
      if (chunk.usage) count(message, chunk.usage, marks);
      changed();
      if (performance.now() - rested > BREATH_MS) {
        await breath();
        rested = performance.now();
      }
    }
    if (!message.finish) throw new ApiError(t("error.ended"), 0);
  } finally {
    message.progress = null;
    message.seconds = {
      first: marks.first ? (marks.first - started) / 1000 : 0,
      all: ((marks.last || performance.now()) - started) / 1000,
      moments: marks.moments,
      tokens: (message.count ?? 0) - marks.before,
    };
    changed();
  }
}

// `count`: tokens of the answer, those of earlier streams included.
function count(message, usage, marks) {
  message.count = marks.before + usage.completion_tokens;
  message.usage = { ...usage, completion_tokens: message.count };
}

function take(message, { delta, logprobs, finish_reason: finish }, marks) {
  const now = performance.now();
  marks.first ||= now;
  if (now - marks.last > 1) marks.moments += 1;
  marks.last = now;
  message.content += delta.content ?? "";
  message.reasoning += delta.reasoning ?? "";
  for (const { index, id, function: part } of delta.tool_calls ?? []) {
    const call = (message.calls[index] ??= { id: "", name: "", text: "" });
    call.id ||= id ?? "";
    call.name ||= part.name ?? "";
    call.text += part.arguments ?? "";
  }
  for (const token of logprobs?.content ?? []) {
    if (message.tokens.length < MOST_TOKENS) message.tokens.push(shortened(token));
  }
  message.finish = finish ?? message.finish;
}

// [text, log probability, [[text, log probability], ...]]
function shortened({ token, logprob, top_logprobs: top }) {
  return [token, logprob, (top ?? []).map((one) => [one.token, one.logprob])];
}

// Tokens a second from the first to the last; from the question on, where they came in few pieces for their number.
export function speed({ usage, seconds }) {
  if (!usage || !seconds) return 0;
  const total = seconds.tokens ?? usage.completion_tokens;
  if (seconds.moments < Math.min(FEWEST_MOMENTS, total)) return seconds.all > 0 ? total / seconds.all : 0;
  const decoding = seconds.all - seconds.first;
  return decoding > 0 ? (total - 1) / decoding : 0;
}
