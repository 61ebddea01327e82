// The libraries, which scripts before this one have left under names of their own, as the modules of the page use them.

import { t } from "./texts.js";

export const { h, render } = globalThis.preact;
export const { useState, useEffect, useLayoutEffect, useRef, useMemo } = globalThis.preactHooks;
export const html = globalThis.htm.bind(h);

// Draws a component again; for state that is kept outside of components.
export function useRedraw() {
  const [, set] = useState(0);
  return useMemo(() => () => set((count) => count + 1), []);
}

// Calls `work` at most once a frame, however often it is asked to.
export function oncePerFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      work();
    });
  };
}

// Lets the page do what else waits; unlike a timer, also at once where it is hidden.
export function breath() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(0);
  });
}

export function download(name, text, type = "application/json") {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// For a panel: Escape closes it, and does nothing else.
export function closesByEscape(event, close) {
  if (event.key !== "Escape") return;
  event.stopPropagation();
  close();
}

// For a panel that opens: the focus goes in, before anybody can see it and press a key, and back to where it was.
export function useFocusInside(place) {
  useLayoutEffect(() => {
    const before = document.activeElement;
    place.current.querySelector("input, textarea, button")?.focus();
    return () => {
      if (before?.isConnected) before.focus();
    };
  }, []);
}

export function Copy({ text, label = t("copy") }) {
  const [said, say] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(typeof text === "function" ? text() : text);
      say(t("copied"));
    } catch {
      say(t("refused"));
    }
    setTimeout(() => say(""), 1200);
  };
  return html`<button type="button" class="quiet" onClick=${copy}>${said || label}</button>`;
}

export function FileButton({ label, accept, onFile }) {
  const input = useRef();
  const take = (event) => {
    const [file] = event.target.files;
    event.target.value = "";
    if (file) onFile(file);
  };
  return html`<button type="button" class="quiet" onClick=${() => input.current.click()}>${label}</button>
    <input ref=${input} type="file" hidden accept=${accept} aria-label=${label} onChange=${take} />`;
}

// The content of a file as a data: URL.
export function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
