// Runs in a frame without an origin, a store or a way to any server (see `FRAME_POLICY` of the server): mermaid makes
// markup of what a model writes, and may do so here. The page gets the drawing as text, and shows it as a picture.

/* global mermaid */
const MOST_CHARACTERS = 20_000;
// Not for a diagram's own directives: what lets HTML or styles of its writer in.
const SECURE = ["secure", "securityLevel", "startOnLoad", "maxTextSize", "maxEdges", "suppressErrorRendering", "htmlLabels", "themeCSS",
  "themeVariables", "fontFamily", "dompurifyConfig"];
const CONFIG = { secure: SECURE, startOnLoad: false, securityLevel: "strict", htmlLabels: false, flowchart: { htmlLabels: false },
  suppressErrorRendering: true, maxTextSize: MOST_CHARACTERS, fontFamily: "sans-serif" };
let count = 0;

addEventListener("message", async ({ data: { id, text, theme }, source }) => {
  if (source !== parent) return;
  let drawn;
  try {
    mermaid.initialize({ ...CONFIG, theme });
    count += 1;
    const { svg } = await mermaid.render(`diagram${count}`, text);
    // As a picture it must be XML, which HTML in labels is not.
    const tree = new DOMParser().parseFromString(svg, "text/html").querySelector("svg");
    drawn = { id, svg: new XMLSerializer().serializeToString(tree) };
  } catch (error) {
    drawn = { id, error: String(error?.message ?? error) };
  }
  parent.postMessage(drawn, "*"); // only the server's own page can be the parent
});
parent.postMessage({ isReady: true }, "*");
