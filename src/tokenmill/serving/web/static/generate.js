// One answer: asks for it as a stream, and fills in a message as its parts come.

import { checked, events } from "./api.js";

// What a message may keep of its tokens: a long answer must not fill the browser's store.
const MOST_TOKENS = 4096;
// Parts within a millisecond were read together, by a page or a line that was busy. With fewer moments than these, the
// time between the first and the last says how fast the page reads.
const FEWEST_MOMENTS = 8;

export async function generate(message, body, signal, changed) {
  const started = performance.now();
  const marks = { first: 0, last: 0, moments: 0 };
  Object.assign(message, { content: "", reasoning: "", calls: [], tokens: [], error: "", finish: "", usage: null });
  const asked = { ...body, return_progress: true };
  try {
    const reply = await checked("v1/chat/completions", { method: "POST", body: asked, signal });
    for await (const data of events(reply)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      message.progress = chunk.choices?.length ? null : chunk.prompt_progress ?? message.progress;
      if (chunk.usage) message.usage = chunk.usage;
      for (const choice of chunk.choices ?? []) take(message, choice, marks);
      changed();
    }
    if (!message.finish) throw new Error("the stream ended before the answer did");
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else message.error = error.message;
  }
  message.progress = null;
  message.seconds = {
    first: marks.first ? (marks.first - started) / 1000 : 0,
    all: ((marks.last || performance.now()) - started) / 1000,
    moments: marks.moments,
  };
  changed();
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
  const { completion_tokens: count } = usage;
  if (seconds.moments < Math.min(FEWEST_MOMENTS, count)) return seconds.all > 0 ? count / seconds.all : 0;
  const decoding = seconds.all - seconds.first;
  return decoding > 0 ? (count - 1) / decoding : 0;
}
