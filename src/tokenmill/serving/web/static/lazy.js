// Libraries that only some texts need, fetched when the first of these is shown.

import { useEffect, useState } from "./ui.js";

const style = (name) => {
  const link = document.createElement("link");
  link.rel = "stylesheet";
  link.href = new URL(name, import.meta.url);
  document.head.append(link);
};

const FETCH = {
  async highlighter() {
    return (await import("./vendor/highlight.min.js")).default;
  },
  async katex() {
    style("./vendor/katex.min.css");
    await import("./vendor/katex.min.js"); // leaves it under a name of its own
    return globalThis.katex;
  },
};
const fetched = {};

// The library once it is there; null before, and where it cannot be had: then the text is shown as it is.
export function useLibrary(name, isWanted = true) {
  const [library, set] = useState(null);
  useEffect(() => {
    if (!isWanted || library) return undefined;
    let isOver = false;
    fetched[name] ??= FETCH[name]().catch(() => {
      fetched[name] = null; // the next text tries again
      return null;
    });
    fetched[name].then((found) => !isOver && set(() => found));
    return () => {
      isOver = true;
    };
  }, [name, isWanted]);
  return library;
}
