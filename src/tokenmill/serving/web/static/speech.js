// Answers read aloud by the browser's own speech synthesis: only by voices of this device, since others send the text to
// somebody, and in the page's language. One answer is read at a time.

import { language, t } from "./texts.js";
import { html, useEffect, useRedraw } from "./ui.js";

// Sentences, since some browsers stop within long texts.
const SENTENCES = /[^.!?:;。！？\n]{1,240}[.!?:;。！？\n]*/g;
const UNSPOKEN = ".code, .katex-html, annotation, button";
const BLOCKS = "p, li, td, th, h1, h2, h3, h4, h5, h6";

const synthesis = globalThis.speechSynthesis;
const watchers = new Set();
let current = null; // what is being read: an object of its own each time

function tell() {
  for (const watcher of watchers) watcher();
}

const voices = () => (synthesis?.getVoices() ?? []).filter(({ localService, lang }) => localService &&
  lang.toLowerCase().split(/[-_]/)[0] === language);

// What an answer says, in parts: as it is shown, without its code and buttons; else as it was written.
function spoken(article, text) {
  const copy = article.querySelector(":scope > .markdown")?.cloneNode(true);
  for (const part of copy?.querySelectorAll(UNSPOKEN) ?? []) part.remove();
  for (const block of copy?.querySelectorAll(BLOCKS) ?? []) block.append("\n");
  const parts = (copy?.textContent ?? text).match(SENTENCES) ?? [];
  return parts.map((part) => part.trim()).filter((part) => /[\p{L}\p{N}]/u.test(part));
}

function read(article, text) {
  synthesis.cancel();
  const [voice] = voices().sort((one, other) => Number(other.default) - Number(one.default));
  const own = { article };
  current = own;
  const end = () => {
    if (current === own) current = null;
    tell();
  };
  const parts = spoken(article, text).map((part) => Object.assign(new SpeechSynthesisUtterance(part), { voice, lang: voice.lang, onerror: end }));
  own.parts = parts; // browsers forget what nothing holds, and never say that it ended
  if (!parts.length) return end();
  parts.at(-1).onend = end;
  for (const part of parts) synthesis.speak(part);
  tell();
}

function stop() {
  current = null;
  synthesis.cancel();
  tell();
}

addEventListener("pagehide", () => current && stop());

// The button of an answer, whose article `place` refers to.
export function ReadAloud({ place, text, fail }) {
  const redraw = useRedraw();
  useEffect(() => {
    const article = place.current;
    watchers.add(redraw);
    return () => {
      watchers.delete(redraw);
      if (current?.article === article) stop();
    };
  }, []);
  if (!synthesis) return null;
  const isRead = current !== null && current.article === place.current;
  const toggle = () => {
    if (isRead) stop();
    else if (voices().length) read(place.current, text);
    else fail(t("speech.noVoice"));
  };
  return html`<button type="button" class="quiet" aria-pressed=${isRead} onClick=${toggle}>${isRead ? t("speech.stop") : t("speech.read")}</button>`;
}
