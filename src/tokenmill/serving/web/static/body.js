// The body of a chat request, from a conversation's settings and the messages before the answer; and the same as a
// command for a shell or a script.

import { key } from "./api.js";
import { withFiles } from "./attachments.js";
import { t } from "./texts.js";

export const SAMPLING = [
  { name: "temperature", step: 0.05, min: 0 },
  { name: "top_p", step: 0.01, min: 0, max: 1 },
  { name: "top_k", step: 1 },
  { name: "min_p", step: 0.01, min: 0, max: 1 },
  { name: "presence_penalty", step: 0.1, min: -2, max: 2 },
  { name: "frequency_penalty", step: 0.1, min: -2, max: 2 },
  { name: "repetition_penalty", step: 0.05, min: 0 },
  { name: "max_tokens", step: 1, min: 1 },
  { name: "seed", step: 1 },
];
export const MOST_ALTERNATIVES = 5;

function parsed(text, what) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what}: ${error.message}`);
  }
}

// `begun`: the answer to go on with. Throws where the person has written something that is not JSON.
export function bodyOf(settings, messages, model, begun) {
  const body = { model, messages: [] };
  if (settings.system) body.messages.push({ role: "system", content: settings.system });
  for (const message of messages) body.messages.push(sent(message));
  for (const { name } of SAMPLING) if (Number.isFinite(settings[name])) body[name] = settings[name];
  if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean);
  if (settings.tools?.trim()) body.tools = parsed(settings.tools, t("body.tools"));
  if (settings.schema?.trim()) {
    const schema = parsed(settings.schema, t("body.schema"));
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.thinking !== "off" && Number.isFinite(settings.budget)) body.thinking_token_budget = settings.budget;
  if (settings.alternatives !== false) Object.assign(body, { logprobs: true, top_logprobs: MOST_ALTERNATIVES });
  if (begun) goOn(body, begun);
  return { ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
}

// `since`: how many tokens it had when somebody last asked it to go on; `max_tokens` counts from there.
function goOn(body, { content, reasoning, count = 0, since = 0 }) {
  body.messages.push({ role: "assistant", content, ...(reasoning && { reasoning_content: reasoning }) });
  Object.assign(body, { add_generation_prompt: false, continue_final_message: true });
  if (body.max_tokens) body.max_tokens = Math.max(1, body.max_tokens - (count - since));
}

function sent({ role, content, images = [], files = [], passages, calls, callId }) {
  if (role === "tool") return { role, content, tool_call_id: callId };
  const text = withFiles(content, files, passages);
  const seen = images.map((url) => ({ type: "image_url", image_url: { url } }));
  const heard = files.filter(({ kind }) => kind === "sound").map(({ url }) => ({ type: "audio_url", audio_url: { url } }));
  if (seen.length + heard.length) return { role, content: [...seen, ...heard, { type: "text", text }] };
  if (!calls?.length) return { role, content: text };
  const tool_calls = calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role, content, tool_calls };
}

const address = () => new URL("v1/chat/completions", document.baseURI).href;

export function asCurl(body) {
  const lines = [`curl -N ${address()}`, "-H 'Content-Type: application/json'"];
  if (key.get()) lines.push('-H "Authorization: Bearer $TOKENMILL_API_KEY"');
  lines.push(`-d '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`);
  return lines.join(" \\\n  ");
}

const OPENAI_FIELDS = new Set(["model", "messages", "temperature", "top_p", "presence_penalty", "frequency_penalty",
  "max_tokens", "seed", "stop", "tools", "response_format", "logprobs", "top_logprobs", "stream", "stream_options"]);

export function asPython(body) {
  const base = address().replace(/\/chat\/completions$/, "");
  const secret = key.get() ? 'os.environ["TOKENMILL_API_KEY"]' : '"none"';
  const own = Object.entries(body).filter(([name]) => OPENAI_FIELDS.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !OPENAI_FIELDS.has(name)));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra)},`);
  return [...(key.get() ? ["import os", ""] : []), "from openai import OpenAI", "",
    `client = OpenAI(base_url=${literal(base)}, api_key=${secret})`, "stream = client.chat.completions.create(",
    ...lines, ")", "for chunk in stream:", "    for choice in chunk.choices:",
    '        print(choice.delta.content or "", end="", flush=True)', ""].join("\n");
}

// A value of JSON as Python writes it.
function literal(value) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}
