// Says to screen readers what is being written: sentence by sentence, not token by token, and when it is done.

import { t } from "./texts.js";
import { html, useEffect, useState } from "./ui.js";

const EVERY_MS = 1500;
const SENTENCES = /^[\s\S]*[.!?:;。！？\n](?=\s|$)/;

export function Announcer({ answers, id, writes }) {
  const [text, say] = useState("");
  useEffect(() => {
    if (writes !== "here") return undefined;
    let message = null;
    let place = 0;
    say(t("say.begins"));
    const timer = setInterval(() => {
      if (!message) {
        message = answers.get(id)?.message ?? null;
        place = message?.content.length ?? 0;
        return;
      }
      const [whole] = message.content.slice(place).match(SENTENCES) ?? [""];
      place += whole.length;
      if (whole.trim()) say(whole);
      else if (message.waits) say(t("say.waits"));
    }, EVERY_MS);
    return () => {
      clearInterval(timer);
      const rest = message?.content.slice(place) ?? "";
      say(message?.error ? "" : `${rest} ${message?.state === "stopped" ? t("say.stopped") : t("say.complete")}`);
    };
  }, [id, writes]);
  return html`<div class="unseen" role="status" aria-live="polite" aria-atomic="true">${text}</div>`;
}
