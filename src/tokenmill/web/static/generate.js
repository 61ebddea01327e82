// One answer: asks for it as a stream, and fills in a message as its parts come.

import { checked, events } from "./api.js";

// What a message may keep of its tokens: a long answer must not fill the browser's store.
const MOST_TOKENS = 4096;

export async function generate(message, body, signal, changed) {
  const started = performance.now();
  const marks = { first: 0, last: 0 };
  Object.assign(message, { content: "", reasoning: "", calls: [], tokens: [], error: "", finish: "", usage: null });
  try {
    const reply = await checked("v1/chat/completions", { method: "POST", body, signal });
    for await (const data of events(reply)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) message.usage = chunk.usage;
      for (const choice of chunk.choices ?? []) take(message, choice, marks);
      changed();
    }
    if (!message.finish) throw new Error("the stream ended before the answer did");
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else message.error = error.message;
  }
  message.seconds = {
    first: marks.first ? (marks.first - started) / 1000 : 0,
    all: ((marks.last || performance.now()) - started) / 1000,
  };
  changed();
}

function take(message, { delta, logprobs, finish_reason: finish }, marks) {
  marks.first ||= performance.now();
  marks.last = performance.now();
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

export function speed({ usage, seconds }) {
  const decoding = seconds ? seconds.all - seconds.first : 0;
  return usage && decoding > 0 ? (usage.completion_tokens - 1) / decoding : 0;
}
