// The tab of the API: every route as the server describes it, and a form that calls it.

import { call, getJson, key } from "./api.js";
import { parts, t } from "./texts.js";
import { Copy, html, useEffect, useState } from "./ui.js";

const SHOWN_BYTES = 100_000;

export function Reference({ isShown }) {
  const [api, set] = useState(null);
  const [error, fail] = useState("");
  const [wanted, search] = useState("");
  useEffect(() => {
    if (!isShown || api) return undefined;
    const load = () => getJson("openapi.json").then(set, (problem) => fail(problem.message)).then(() => {});
    load();
    return key.watch((what) => {
      if (what !== "changed") return;
      fail("");
      load();
    });
  }, [isShown, api]);
  const routes = Object.entries(api?.paths ?? {}).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, route]) => ({ path, method: method.toUpperCase(), route })));
  return html`<section class="reference" hidden=${!isShown} aria-label=${t("tab.api")}>
    <h2>${t("api.title")} ${api && html`<small>${t("api.version", { version: api.info.version })}</small>`}</h2>
    <p>${parts("api.data", { link: html`<a href="openapi.json">openapi.json</a>` })}
      <input type="search" aria-label=${t("api.search")} placeholder=${t("search")} value=${wanted}
        onInput=${(event) => search(event.target.value)} /></p>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${routes.filter(({ path }) => path.includes(wanted)).map((one) => html`<${Route} key=${one.method + one.path}
      ...${one} schemas=${api.components.schemas} />`)}
  </section>`;
}

function Route({ path, method, route, schemas }) {
  const [isOpen, open] = useState(false);
  const [kind, content] = Object.entries(route.requestBody?.content ?? {})[0] ?? [];
  // Where it may be one of several bodies, the first is shown.
  const schema = content && schemas[(content.schema.anyOf?.[0] ?? content.schema).$ref.split("/").pop()];
  return html`<details class="route" onToggle=${(event) => open(event.target.open)}>
    <summary><b>${method}</b> ${path} <span class="hint">${(route.description ?? "").split("\n")[0]}</span></summary>
    ${isOpen && html`${(route.description ?? "").includes("\n") && html`<p>${route.description}</p>`}
      ${schema && html`<${Fields} schema=${schema} />`}
      ${kind === "multipart/form-data" ? html`<p class="hint">${t("api.form")}</p>`
        : html`<${Try} ...${{ path, method, schema }} parameters=${route.parameters ?? []} />`}`}
  </details>`;
}

function Fields({ schema }) {
  const needed = new Set(schema.required ?? []);
  return html`<div class="wide" tabindex="0" role="region" aria-label=${t("api.fields")}><table><thead><tr>
      ${["field", "type", "default"].map((name) => html`<th key=${name} scope="col">${t(`api.${name}`)}</th>`)}</tr></thead>
    <tbody>${Object.entries(schema.properties ?? {}).map(([name, field]) => html`<tr key=${name}><td><code>${name}</code></td>
      <td>${kindOf(field)}</td><td>${needed.has(name) ? t("api.required") : JSON.stringify(field.default) ?? ""}</td></tr>`)}
    </tbody></table></div>`;
}

function kindOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return [...new Set(schema.anyOf.map(kindOf))].join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.type === "array") return `${kindOf(schema.items ?? {})}[]`;
  return schema.type ?? "any";
}

const EXAMPLES = {
  "/v1/chat/completions": { messages: [{ role: "user", content: "Hello" }], max_tokens: 32 },
  "/v1/completions": { prompt: "Once upon a time", max_tokens: 32 },
  "/v1/messages": { model: "", messages: [{ role: "user", content: "Hello" }], max_tokens: 32 },
  "/v1/messages/count_tokens": { model: "", messages: [{ role: "user", content: "Hello" }] },
  "/v1/responses": { input: "Hello", max_output_tokens: 32 },
  "/v1/responses/input_tokens": { input: "Hello" },
  "/v1/embeddings": { input: "Hello" },
  "/rerank": { query: "Where is the mill?", documents: ["By the river.", "It is late."] },
  "/v1/rerank": { query: "Where is the mill?", documents: ["By the river.", "It is late."] },
  "/v2/rerank": { query: "Where is the mill?", documents: ["By the river.", "It is late."] },
  "/v1/reranking": { query: "Where is the mill?", documents: ["By the river.", "It is late."] },
  "/score": { text_1: "Where is the mill?", text_2: ["By the river.", "It is late."] },
  "/v1/score": { text_1: "Where is the mill?", text_2: ["By the river.", "It is late."] },
  "/classify": { input: "Hello" },
  "/pooling": { input: "Hello" },
  "/embed": { inputs: "Hello" },
  "/predict": { inputs: "Hello" },
  "/generate": { text: "Once upon a time", sampling_params: { max_new_tokens: 32 } },
  "/tokenize": { prompt: "Hello" },
  "/detokenize": { tokens: [1, 2, 3] },
  "/v1/sessions": { kind: "chat" },
  "/v1/sessions/{session_id}/input": { messages: [{ role: "user", content: "Hello" }], max_tokens: 32 },
  "/abort_requests": { request_ids: [""] },
};

function Try({ path, method, schema, parameters }) {
  const [values, setValues] = useState({});
  const [body, setBody] = useState(JSON.stringify(EXAMPLES[path] ?? {}, null, 2));
  const [answer, setAnswer] = useState(null);
  const [controller, setController] = useState(null);
  const run = async (event) => {
    event.preventDefault();
    const stop = new AbortController();
    setController(stop);
    try {
      const options = { method, signal: stop.signal, text: schema ? body : undefined };
      await show(await call(address(path, parameters, values), options), setAnswer);
    } catch (error) {
      setAnswer((before) => ({ ...before, status: error.name === "AbortError" ? t("end.stopped") : error.message }));
    }
    setController(null);
  };
  return html`<form class="try" onSubmit=${run}>
    ${parameters.map(({ name, required }) => html`<label key=${name}>${name}${required ? "" : ` ${t("api.optional")}`}
      <input value=${values[name] ?? ""} required=${required}
        onInput=${(event) => setValues({ ...values, [name]: event.target.value })} /></label>`)}
    ${schema && html`<label>${t("api.body")}<textarea rows=${Math.min(14, body.split("\n").length + 1)} spellcheck="false" value=${body}
      onInput=${(event) => setBody(event.target.value)}></textarea></label>`}
    ${controller ? html`<button type="button" class="stop" onClick=${() => controller.abort()}>${t("composer.stop")}</button>`
      : html`<button type="submit">${t("api.try")}</button>`}
    ${answer && html`<div class="answer"><p role="status"><b>${answer.status}</b> ${answer.type}
      <${Copy} text=${answer.text ?? ""} /></p><pre tabindex="0">${answer.text}</pre></div>`}
  </form>`;
}

function address(path, parameters, values) {
  const filled = path.replace(/\{(\w+)\}/g, (_, name) => encodeURIComponent(values[name] ?? ""));
  const query = new URLSearchParams(parameters.filter(({ name, in: place }) => place === "query" && values[name])
    .map(({ name }) => [name, values[name]]));
  return filled.slice(1) + (query.size ? `?${query}` : "");
}

// A stream is shown as it comes; what is very long, up to a point.
async function show(reply, set) {
  const status = `${reply.status} ${reply.statusText}`;
  const type = reply.headers.get("content-type") ?? "";
  let text = "";
  set({ status, type, text });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    text += value;
    if (text.length > SHOWN_BYTES) {
      reader.cancel();
      text = `${text.slice(0, SHOWN_BYTES)}\n${t("api.more")}`;
      set({ status, type, text });
      return;
    }
    set({ status, type, text });
  }
  if (type.startsWith("application/json")) set({ status, type, text: JSON.stringify(JSON.parse(text), null, 2) });
}
