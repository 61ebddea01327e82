// The tokens of an answer one by one, those that the model was less sure of more marked; a click on one shows what else
// was likely, and lets the answer go on from there with another.

import { t } from "./texts.js";
import { html, useEffect, useRef, useState } from "./ui.js";

// A token that holds only a part of a character is shown as this sign.
const PART = "\ufffd";

export function Tokens({ tokens, onBranch }) {
  const [open, set] = useState(-1);
  return html`<div class="tokens">${tokens.map(([text, logprob], index) => html`<button type="button"
      key=${index} class="token sure-${Math.min(4, Math.floor(Math.exp(logprob) * 5))} ${index === open ? "open" : ""}"
      aria-expanded=${index === open} onClick=${() => set(index === open ? -1 : index)}>${visible(text)}</button>`)}
    ${open >= 0 && html`<${Alternatives} token=${tokens[open]} onBranch=${onBranch && ((choice) => onBranch(open, choice))} />`}
    </div>`;
}

function Alternatives({ token: [text, logprob, top], onBranch }) {
  const rows = top.some(([other]) => other === text) ? top : [[text, logprob], ...top];
  const table = useRef();
  useEffect(() => table.current.scrollIntoView({ block: "nearest" }), [text, logprob]);
  return html`<table ref=${table} class="alternatives" aria-label=${t("tokens.alternatives")}><tbody>${rows.map(([other, value]) => html`
    <tr class=${other === text ? "chosen" : ""}><td><code>${named(other)}</code></td>
    <td>${(100 * Math.exp(value)).toFixed(2)} %</td><td><meter min="0" max="1" value=${Math.exp(value)}
      aria-label=${t("tokens.probability")}></meter></td>
    <td class="go">${onBranch && other !== text && other && !other.includes(PART) && !isSign(other) && html`<button type="button" class="quiet"
      aria-label=${t("tokens.goOnWith", { token: named(other) })} onClick=${() => onBranch([other, value])}>${t("tokens.goOn")}</button>`}</td>
    </tr>`)}</tbody></table>`;
}

function visible(text) {
  return text.replaceAll("\n", "⏎") || "∅";
}

// White space alone would not be seen among others.
function named(text) {
  return text.trim() ? visible(text) : visible(text).replaceAll(" ", "␣");
}

// A sign of the model's own, with which an answer ends: no text goes on behind it.
function isSign(text) {
  return /^(?:<\|.*\|>|<\/?s>|<eos>|<end_of_turn>)$/.test(text);
}

// The text of an answer before its token `index`; null where it is not known, as inside the thinking before it.
export function prefixBefore({ tokens, content, reasoning }, index) {
  const from = reasoning ? firstOfContent(tokens, content) : 0;
  if (from < 0 || index < from) return null;
  let place = 0;
  for (let at = from; at < index; at += 1) {
    const [text] = tokens[at];
    if (text.includes(PART)) {
      // The characters that it is a part of end where the next whole token begins.
      const next = tokens.slice(at + 1).find(([one]) => one && !one.includes(PART));
      const end = next ? content.indexOf(next[0], place) : -1;
      if (end < 0 || index <= at + 1 && tokens[index]?.[0].includes(PART)) return null;
      if (next === tokens[at + 1]) place = end;
      continue;
    }
    if (!content.startsWith(text, place)) return null;
    place += text.length;
  }
  return content.slice(0, place);
}

// The first token from which on the tokens spell the answer: those before it are thinking.
function firstOfContent(tokens, content) {
  const beginning = content.slice(0, 200);
  let text = "";
  for (let at = tokens.length - 1; at >= 0; at -= 1) {
    text = tokens[at][0] + text;
    if (text.length >= content.length && text.startsWith(beginning)) return at;
  }
  return -1;
}
