// Ask a running server through Ollama's own client for JavaScript; `test_ollama` runs this beside its package.
//
// node with_ollama.mjs URL MODEL        (knows nothing of TokenMill; fails where an answer is not as asked for)
import assert from "node:assert";
import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [url, model] = process.argv.slice(2);
const require = createRequire(pathToFileURL(join(process.cwd(), "none.js")));
const { Ollama } = require("ollama");
const client = new Ollama({ host: url });
const messages = [{ role: "user", content: "What is TokenMill?" }];
const options = { temperature: 0, num_predict: 24 };

const whole = (await client.chat({ model, messages, options })).message.content;
assert(whole, "no answer");
let streamed = "";
for await (const part of await client.chat({ model, messages, options, stream: true })) streamed += part.message.content;
assert.strictEqual(streamed, whole);

const format = { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"] };
const shaped = await client.generate({ model, prompt: "A city, please.", format, options: { temperature: 0 } });
assert(["Paris", "Rome"].includes(JSON.parse(shaped.response).city), shaped.response);

const vectors = await client.embed({ model, input: ["a mill", "a page"] });
assert.strictEqual(vectors.embeddings.length, 2);

const listed = (await client.list()).models.map((one) => one.name);
assert(listed.includes(`${model}:latest`), listed);
assert((await client.show({ model })).capabilities.includes("completion"));
assert.strictEqual((await client.ps()).models.length, 1);
await assert.rejects(client.chat({ model: "cow", messages }), /not found/);

const stopped = await client.chat({ model, messages, options: { num_predict: 400 }, stream: true });
setTimeout(() => stopped.abort(), 100);
await assert.rejects(async () => {
  for await (const _ of stopped);
}, { name: "AbortError" });
console.log("ollama.js", JSON.stringify(whole));
