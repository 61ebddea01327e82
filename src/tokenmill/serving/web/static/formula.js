// Formulas: what of a text is LaTeX, and its picture by KaTeX.

import { useLibrary } from "./lazy.js";
import { html, useLayoutEffect, useRef } from "./ui.js";

const LONGEST = 2000;
// "$5 and $6" are prices: inside no space at the ends, and no digit behind.
const INLINE = [/^\$\$((?:\\[^]|[^\\$]){1,2000}?)\$\$/, /^\$(?!\s)((?:\\.|[^\\$\n]){1,1000}?)(?<!\s)\$(?!\d)/,
  /^\\\(((?:[^\\\n]|\\(?!\))){1,1000}?)\\\)/, /^\\\[((?:[^\\]|\\(?!\])){1,2000}?)\\\]/];
const BLOCK = /^(?:\$\$((?:\\[^]|[^\\$]){1,2000}?)\$\$|\\\[((?:[^\\]|\\(?!\])){1,2000}?)\\\])[ \t]*(?:\n+|$)/;

export const extensions = [
  {
    name: "formula",
    level: "block",
    start: (text) => text.match(/\n(?:\$\$|\\\[)/)?.index,
    tokenizer(text) {
      const found = BLOCK.exec(text);
      return found ? { type: "formula", raw: found[0], text: found[1] ?? found[2], isBlock: true } : undefined;
    },
  },
  {
    name: "inlineFormula",
    level: "inline",
    start: (text) => text.match(/\$|\\[([]/)?.index,
    tokenizer(text) {
      if (text[0] !== "$" && text[0] !== "\\") return undefined;
      for (const [number, pattern] of INLINE.entries()) {
        const found = pattern.exec(text);
        if (found) return { type: "formula", raw: found[0], text: found[1], isBlock: number === 0 || number === 3 };
      }
      return undefined;
    },
  },
];

export function Formula({ raw, text, isBlock }) {
  const katex = useLibrary("katex");
  const place = useRef();
  useLayoutEffect(() => {
    if (!katex || text.length > LONGEST) return;
    try {
      // A model's formula may neither link nor load, nor grow beyond the page.
      katex.render(text, place.current, { displayMode: isBlock, throwOnError: true, trust: false, strict: "ignore",
        maxSize: 20, maxExpand: 300 });
    } catch {
      place.current.textContent = raw; // not LaTeX, or not all of it
    }
  }, [katex, text, isBlock]);
  return html`<span class=${isBlock ? "formula block" : "formula"} tabindex=${isBlock ? 0 : undefined}
    ref=${place}>${katex ? null : raw}</span>`;
}
