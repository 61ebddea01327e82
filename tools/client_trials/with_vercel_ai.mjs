// ai (Vercel), with @ai-sdk/openai-compatible.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embed, generateText, streamText, tool } from "ai";
import { z } from "zod";
import { BASE, MODEL, call } from "./report.mjs";

const mill = createOpenAICompatible({ name: "mill", baseURL: BASE, apiKey: "none", supportsStructuredOutputs: true });
const how = { model: mill(MODEL), prompt: "What is a page?", maxOutputTokens: 64, maxRetries: 0 };

await call("generateText", async () => (await generateText(how)).text);
await call("streamText", async () => {
  let text = "";
  for await (const part of streamText(how).textStream) text += part;
  return text;
});
await call("generateText with an object", async () => {
  const schema = z.object({ shared: z.boolean() });
  const answer = await generateText({ ...how, output: Output.object({ schema }) });
  return typeof answer.output.shared === "boolean";
});
await call("tools", async () => {
  const weather = tool({ description: "today's", inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }) });
  const answer = await generateText({ ...how, tools: { weather }, toolChoice: "required" });
  return answer.toolCalls[0].toolName === "weather";
});
await call("embed", async () => {
  const answer = await embed({ model: mill.embeddingModel?.(MODEL) ?? mill.textEmbeddingModel(MODEL), value: "a" });
  return answer.embedding.length;
});
