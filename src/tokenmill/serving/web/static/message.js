// One message as it is shown: its text, thinking, calls, tokens, what it cost, and what can be done with it.

import { Files } from "./attachments.js";
import { Sources } from "./documents.js";
import { speed } from "./generate.js";
import { Markdown } from "./markdown.js";
import { ReadAloud } from "./speech.js";
import { number, t } from "./texts.js";
import { Tokens } from "./tokens.js";
import { Copy, html, oncePerFrame, useLayoutEffect, useRedraw, useRef, useState } from "./ui.js";

export function Message({ message, choices, isBusy, canGoOn, passages = [], acts }) {
  const redraw = useRedraw();
  const place = useRef();
  const isWriting = message.state === "writing";
  // Only this message is drawn anew with what comes, not the page; none of it comes before the layout's effect.
  useLayoutEffect(() => (isWriting ? acts.watch(oncePerFrame(redraw)) : undefined), [message, isWriting, isBusy]);
  const [isEdited, edit] = useState(false);
  const [showsTokens, showTokens] = useState(false);
  const { role, content, images = [], files = [], reasoning, calls = [], tokens = [], error } = message;
  const isAnswer = role === "assistant";
  const save = (text) => {
    edit(false);
    acts.edit(message, text);
  };
  return html`<article class="message ${role}" ref=${place} aria-label=${t(`message.${role}`)}>
    <header><b>${role === "tool" ? t("message.result", { name: message.name }) : t(`message.${role}`)}</b>
      ${choices.length > 1 && html`<${Branches} ...${{ message, choices, acts, isBusy }} />`}</header>
    ${reasoning && html`<details class="reasoning"><summary>${t("message.thinking")}</summary><${Markdown} text=${reasoning} isOpen=${isWriting} /></details>`}
    ${isEdited ? html`<${Editor} text=${content} onSave=${save} onCancel=${() => edit(false)} />`
      : showsTokens && tokens.length ? html`<${Tokens} tokens=${tokens}
        onBranch=${!isBusy && ((index, choice) => acts.branchAt(message, index, choice))} />`
      : isAnswer ? html`<${Markdown} text=${content} isOpen=${isWriting} />`
      : html`<div class="plain">${content}</div>`}
    <${Images} urls=${images} />
    <${Files} files=${files} />
    ${passages.length > 0 && html`<${Sources} passages=${passages} />`}
    ${calls.map((call) => html`<${Call} key=${call.id} call=${call} />`)}
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${message.waits && html`<p class="hint waits" role="status">${t("message.waits", { reason: message.waits })}</p>`}
    ${!isEdited && html`<footer>
      ${isAnswer && html`<${Cost} message=${message} />`}
      <span class="actions">
        <${Copy} text=${content} />
        ${isAnswer && !isWriting && content && html`<${ReadAloud} place=${place} text=${content} fail=${acts.fail} />`}
        ${tokens.length > 0 && html`<button type="button" class="quiet" aria-pressed=${showsTokens}
          onClick=${() => showTokens(!showsTokens)}>${t("message.tokens")}</button>`}
        ${!isBusy && html`<button type="button" class="quiet" onClick=${() => edit(true)}>${t("message.edit")}</button>`}
        ${isAnswer && !isBusy && html`<button type="button" class="quiet"
          onClick=${() => acts.again(message)}>${t("message.again")}</button>`}
        ${isAnswer && canGoOn && !isBusy && html`<button type="button" class="quiet"
          onClick=${() => acts.goOn(message)}>${t("message.goOn")}</button>`}
      </span>
    </footer>`}
  </article>`;
}

export function Images({ urls, remove }) {
  return urls.length > 0 && html`<div class="images">${urls.map((url, index) => html`<figure key=${index}>
    <img src=${url} alt=${t("image", { number: index + 1 })} />
    ${remove && html`<button type="button" class="quiet" aria-label=${t("image.remove", { number: index + 1 })}
      onClick=${() => remove(index)}>×</button>`}</figure>`)}</div>`;
}

function Branches({ message, choices, acts, isBusy }) {
  const place = choices.indexOf(message);
  const go = (step) => acts.choose(choices[place + step]);
  return html`<span class="branches">
    <button type="button" class="quiet" aria-label=${t("branch.earlier")} disabled=${isBusy || place === 0}
      onClick=${() => go(-1)}>‹</button> ${t("branch.place", { number: place + 1, all: choices.length })} ${" "}
    <button type="button" class="quiet" aria-label=${t("branch.later")} disabled=${isBusy || place === choices.length - 1}
      onClick=${() => go(1)}>›</button></span>`;
}

function Editor({ text, onSave, onCancel }) {
  const [draft, set] = useState(text);
  const onKey = (event) => {
    if (event.key === "Escape") onCancel();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) onSave(draft);
  };
  return html`<div class="editor">
    <textarea aria-label=${t("message.text")} rows=${Math.min(20, draft.split("\n").length + 1)} value=${draft}
      onInput=${(event) => set(event.target.value)} onKeyDown=${onKey} ref=${(area) => area && area.focus()}></textarea>
    <button type="button" onClick=${() => onSave(draft)}>${t("message.save")}</button>
    <button type="button" class="quiet" onClick=${onCancel}>${t("cancel")}</button></div>`;
}

function Call({ call }) {
  let text = call.text;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // Still on its way, or wrong: shown as it is.
  }
  return html`<div class="call"><b>${t("message.calls", { name: call.name })}</b><pre tabindex="0">${text}</pre></div>`;
}

const ENDS = ["length", "stopped", "abort", "error"];

// How far the prompt is computed, before the first token.
function PromptProgress({ total, processed, left_ms: left }) {
  const seconds = left === null ? "" : t("cost.left", { seconds: number.format(Math.ceil(left / 1000)) });
  const text = t("cost.progress", { done: number.format(processed), total: number.format(total) });
  return html`<span class="cost"><progress max=${total} value=${processed} aria-label=${t("cost.prompt")}></progress>
    ${` ${text}${seconds}`}</span>`;
}

function Cost({ message }) {
  const { usage, seconds, finish, progress } = message;
  if (progress) return html`<${PromptProgress} ...${progress} />`;
  if (!seconds && !finish) return html`<span class="cost">…</span>`;
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(t("cost.prompts", { prompt: usage.prompt_tokens, cached }), t("cost.tokens", { count: usage.completion_tokens }));
    if (speed(message)) parts.push(t("cost.speed", { speed: number.format(speed(message)) }));
  }
  if (seconds?.first) parts.push(t("cost.first", { seconds: seconds.first.toFixed(2) }));
  if (finish && finish !== "stop") parts.push(ENDS.includes(finish) ? t(`end.${finish}`) : finish);
  return html`<span class="cost">${parts.join(" · ")}</span>`;
}
