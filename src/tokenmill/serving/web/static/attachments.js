// What a message brings besides its words: images and sound where the model takes them, and files of text and PDFs, whose
// text is sent, or searched where it is long (documents.js). Other files are refused, with the reason.

import { textOfPdf } from "./pdf.js";
import { number, t } from "./texts.js";
import { dataUrl, html } from "./ui.js";

// A book of a thousand pages has some 3 MB.
const MOST_TEXT_BYTES = 5_000_000;
const MOST_PDF_BYTES = 50_000_000;
const ACCEPTED = "text/*,.pdf,.md,.csv,.json,.jsonl,.yaml,.yml,.toml,.ini,.log,.py,.js,.ts,.c,.h,.cpp,.rs,.go,.java,.sh,.sql,.html,.css,.xml";

// What a file dialogue offers for a model.
export const accepted = ({ takesImages, takesSound }) => [ACCEPTED, takesImages && "image/*", takesSound && "audio/*"].filter(Boolean).join(",");

// {kind, name, text or url} of a file. Throws with a sentence where it cannot be sent.
export async function attachmentOf(file, { takesImages, takesSound }) {
  const { name, type, size } = file;
  if (type.startsWith("image/") && type !== "image/svg+xml") {
    if (!takesImages) throw new Error(t("file.noImages", { name }));
    return { kind: "image", name, url: await dataUrl(file) };
  }
  if (type.startsWith("audio/")) {
    if (!takesSound) throw new Error(t("file.noSound", { name }));
    return { kind: "sound", name, url: await dataUrl(file) };
  }
  if (type === "application/pdf" || name.toLowerCase().endsWith(".pdf")) return { kind: "text", name, text: await pdfOf(file) };
  if (size > MOST_TEXT_BYTES) throw new Error(t("file.large", { name, most: number.format(MOST_TEXT_BYTES / 1000) }));
  const text = textOf(new Uint8Array(await file.arrayBuffer()));
  if (text === null) throw new Error(t("file.noText", { name }));
  return { kind: "text", name, text };
}

async function pdfOf(file) {
  const { name, size } = file;
  if (size > MOST_PDF_BYTES) throw new Error(t("pdf.large", { name, most: number.format(MOST_PDF_BYTES / 1e6) }));
  const text = await textOfPdf(await file.arrayBuffer(), MOST_TEXT_BYTES).catch(({ reason }) => {
    throw new Error(t(`pdf.${reason}`, { name }));
  });
  if (text.length > MOST_TEXT_BYTES) throw new Error(t("file.large", { name, most: number.format(MOST_TEXT_BYTES / 1000) }));
  return text;
}

function textOf(bytes) {
  if (bytes.includes(0)) return null;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    return null;
  }
}

// The files of a message, and the passages of documents that it is about, as a part of its text: each between fences
// that do not end within it.
export function withFiles(content, files = [], passages = []) {
  const whole = files.filter(({ kind }) => kind === "text").map(({ name, text }) => fenced(name, text));
  const found = passages.map(({ name, from, to, all, text }) => fenced(`${name} (${from === to ? from : `${from}–${to}`}/${all})`, text));
  return [...whole, ...found, content].filter(Boolean).join("\n\n");
}

function fenced(title, text) {
  let longest = 2;
  for (const [ticks] of text.matchAll(/`+/g)) longest = Math.max(longest, ticks.length);
  const fence = "`".repeat(longest + 1);
  return `${title}\n${fence}\n${text.replace(/\n?$/, "\n")}${fence}`;
}

const SHOWN_CHARACTERS = 2000;

export function Files({ files, remove }) {
  return files.length > 0 && html`<div class="files">${files.map(({ kind, name, text, url, count }, index) => html`<div class="file" key=${index}>
    ${kind === "text" ? html`<details><summary>${name} <small>${t("file.characters", { count: number.format(text.length) })}</small></summary>
        <pre tabindex="0">${text.slice(0, SHOWN_CHARACTERS)}${text.length > SHOWN_CHARACTERS ? "…" : ""}</pre></details>`
      : kind === "document" ? html`<span>☰ ${name} <small>${t("file.document", { count: number.format(count) })}</small></span>`
      : html`<span>♪ ${name} <small>${t("file.sound", { size: number.format(Math.round(url.length * 0.75 / 1000)) })}</small></span>`}
    ${remove && html`<button type="button" class="quiet" aria-label=${t("file.remove", { name })} onClick=${() => remove(index)}>×</button>`}
  </div>`)}</div>`;
}

const isText = (value) => typeof value === "string";

// Whether what a file of conversations says of a message's files can be shown and sent.
export const areFiles = (files) => files.every((one) => one && isText(one.name) && (one.kind === "text" ? isText(one.text)
  : one.kind === "document" ? isText(one.id) && Number.isInteger(one.count)
  : one.kind === "sound" && isText(one.url) && /^data:audio\/[a-z0-9+.-]+;base64,/.test(one.url)));
