// The text of a PDF, read by pdf.js in a worker that ends with it: one that is made to take for ever holds nobody up.

const WORKER = new URL("./vendor/pdf.worker.min.mjs", import.meta.url).href;
const MOST_MS = 30_000;
const OPTIONS = { disableFontFace: true, enableXfa: false, isImageDecoderSupported: false, isOffscreenCanvasSupported: false,
  useSystemFonts: false, useWasm: false, verbosity: 0 };
// The server's policy lets this one name addresses of scripts, and it knows a single address.
const policy = globalThis.trustedTypes?.createPolicy("pdf", { createScriptURL: () => WORKER });

// Which of the texts `pdf.…` says why there is nothing to read.
export class Unreadable extends Error {
  constructor(reason) {
    super(reason);
    this.reason = reason;
  }
}

// Pages one after the other, with an empty line between them, until there are more characters than wanted.
export async function textOfPdf(data, mostCharacters) {
  const { getDocument, PDFWorker } = await import("./vendor/pdf.min.mjs");
  const port = new Worker(policy?.createScriptURL("") ?? WORKER, { type: "module" });
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Unreadable("slow")), MOST_MS);
  });
  try {
    const task = getDocument({ ...OPTIONS, data, worker: PDFWorker.create({ port }) });
    return await Promise.race([read(task, mostCharacters), late]);
  } catch (error) {
    throw error instanceof Unreadable ? error : new Unreadable(error?.name === "PasswordException" ? "locked" : "broken");
  } finally {
    clearTimeout(timer);
    port.terminate();
  }
}

async function read(task, mostCharacters) {
  const pdf = await task.promise;
  const pages = [];
  for (let number = 1, count = 0; number <= pdf.numPages && count <= mostCharacters; number += 1) {
    const { items } = await (await pdf.getPage(number)).getTextContent();
    const text = items.map(({ str = "", hasEOL }) => (hasEOL ? `${str}\n` : str)).join("").trim();
    if (text) pages.push(text);
    count += text.length;
  }
  if (!pages.length) throw new Unreadable("empty");
  return pages.join("\n\n");
}
