"""The page at /docs: the API as /openapi.json describes it, drawn by the page itself. Nothing comes from elsewhere."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>TokenMill API</title>
<style>
  :root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
  body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
  details { border: 1px solid #8886; border-radius: 6px; margin: .6rem 0; padding: .5rem .8rem; }
  summary { cursor: pointer; font-family: ui-monospace, monospace; }
  summary b { display: inline-block; width: 4rem; color: #0a7d4b; }
  table { border-collapse: collapse; width: 100%; font-size: .9rem; margin-top: .5rem; }
  td, th { text-align: left; vertical-align: top; padding: .25rem .6rem; border-top: 1px solid #8884; }
  td:first-child { font-family: ui-monospace, monospace; white-space: nowrap; }
</style>
</head>
<body>
<h1>TokenMill API</h1>
<p>Version <span id="version"></span>. The same as data: <a href="openapi.json">openapi.json</a>.</p>
<main id="routes"></main>
<script>
const make = (tag, text, ...children) => {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  element.append(...children);
  return element;
};
const kind = (schema) => {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return [...new Set(schema.anyOf.map(kind))].join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.type === "array") return "list of " + kind(schema.items || {});
  return schema.type || "any";
};
const fields = (schema) => {
  const table = make("table", "", make("tr", "", make("th", "field"), make("th", "type"), make("th", "default")));
  for (const [name, field] of Object.entries(schema.properties || {})) {
    const needed = (schema.required || []).includes(name) ? "required" : JSON.stringify(field.default) ?? "";
    table.append(make("tr", "", make("td", name), make("td", kind(field)), make("td", needed)));
  }
  return table;
};
fetch("openapi.json").then((reply) => reply.json()).then((api) => {
  document.getElementById("version").textContent = api.info.version;
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, route] of Object.entries(methods)) {
      const summary = make("summary", "", make("b", method.toUpperCase()), path);
      const details = make("details", "", summary, make("p", route.description || route.summary || ""));
      const body = route.requestBody?.content["application/json"]?.schema.$ref;
      if (body) details.append(fields(api.components.schemas[body.split("/").pop()]));
      document.getElementById("routes").append(details);
    }
  }
});
</script>
</body>
</html>
"""


async def docs(_request: Request) -> HTMLResponse:
    """The page."""
    return HTMLResponse(_PAGE)
