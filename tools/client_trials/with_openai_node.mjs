// openai, the client for Node.
import OpenAI from "openai";
import { BASE, MODEL, call } from "./report.mjs";

const client = new OpenAI({ baseURL: BASE, apiKey: "none" });
const messages = [{ role: "user", content: "What is a page?" }];
const parameters = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };

await call("chat", async () => {
  const answer = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 16 });
  return answer.choices[0].message.content;
});
await call("chat, streamed", async () => {
  let text = "";
  const stream = await client.chat.completions.create({ model: MODEL, messages, max_tokens: 16, stream: true });
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  return text;
});
await call("tools", async () => {
  const tools = [{ type: "function", function: { name: "weather", parameters } }];
  const answer = await client.chat.completions.create({ model: MODEL, messages, tools, tool_choice: "required" });
  return answer.choices[0].message.tool_calls[0].function.name === "weather";
});
await call("responses", async () => {
  const answer = await client.responses.create({ model: MODEL, input: "What is a page?", max_output_tokens: 16 });
  return answer.output_text;
});
await call("embeddings", async () => {
  const answer = await client.embeddings.create({ model: MODEL, input: ["a", "b"] });
  return answer.data[1].embedding.length;
});
await call("models", async () => (await client.models.list()).data.some((model) => model.id === MODEL));
