// One message as it is shown: its text, thinking, calls, tokens, what it cost, and what can be done with it.

import { speed } from "./generate.js";
import { Markdown } from "./markdown.js";
import { Tokens } from "./tokens.js";
import { Copy, html, number, oncePerFrame, useEffect, useRedraw, useState } from "./ui.js";

const NAMES = { user: "You", assistant: "Model", tool: "Result" };

export function Message({ message, choices, isBusy, canGoOn, acts }) {
  const redraw = useRedraw();
  const isWriting = message.state === "writing";
  // Only this message is drawn anew with what comes, not the page.
  useEffect(() => (isWriting ? acts.watch(oncePerFrame(redraw)) : undefined), [message, isWriting, isBusy]);
  const [isEdited, edit] = useState(false);
  const [showsTokens, showTokens] = useState(false);
  const { role, content, images = [], reasoning, calls = [], tokens = [], error } = message;
  const isAnswer = role === "assistant";
  const save = (text) => {
    edit(false);
    acts.edit(message, text);
  };
  return html`<article class="message ${role}" aria-label=${NAMES[role]}>
    <header><b>${role === "tool" ? `Result of ${message.name}` : NAMES[role]}</b>
      ${choices.length > 1 && html`<${Branches} ...${{ message, choices, acts, isBusy }} />`}</header>
    ${reasoning && html`<details class="reasoning"><summary>Thinking</summary><${Markdown} text=${reasoning} isOpen=${isWriting} /></details>`}
    ${isEdited ? html`<${Editor} text=${content} onSave=${save} onCancel=${() => edit(false)} />`
      : showsTokens && tokens.length ? html`<${Tokens} tokens=${tokens}
        onBranch=${!isBusy && ((index, choice) => acts.branchAt(message, index, choice))} />`
      : isAnswer ? html`<${Markdown} text=${content} isOpen=${isWriting} />`
      : html`<div class="plain">${content}</div>`}
    <${Images} urls=${images} />
    ${calls.map((call) => html`<${Call} key=${call.id} call=${call} />`)}
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${message.waits && html`<p class="hint waits" role="status">Waiting for the server (${message.waits}). What is written is
      kept, and the answer goes on when the server is there.</p>`}
    ${!isEdited && html`<footer>
      ${isAnswer && html`<${Cost} message=${message} />`}
      <span class="actions">
        <${Copy} text=${content} />
        ${tokens.length > 0 && html`<button type="button" class="quiet" aria-pressed=${showsTokens}
          onClick=${() => showTokens(!showsTokens)}>Tokens</button>`}
        ${!isBusy && html`<button type="button" class="quiet" onClick=${() => edit(true)}>Edit</button>`}
        ${isAnswer && !isBusy && html`<button type="button" class="quiet"
          onClick=${() => acts.again(message)}>Regenerate</button>`}
        ${isAnswer && canGoOn && !isBusy && html`<button type="button" class="quiet"
          onClick=${() => acts.goOn(message)}>Continue</button>`}
      </span>
    </footer>`}
  </article>`;
}

export function Images({ urls, remove }) {
  return urls.length > 0 && html`<div class="images">${urls.map((url, index) => html`<figure key=${index}>
    <img src=${url} alt=${`Image ${index + 1}`} />
    ${remove && html`<button type="button" class="quiet" aria-label=${`Remove image ${index + 1}`}
      onClick=${() => remove(index)}>×</button>`}</figure>`)}</div>`;
}

function Branches({ message, choices, acts, isBusy }) {
  const place = choices.indexOf(message);
  const go = (step) => acts.choose(choices[place + step]);
  return html`<span class="branches">
    <button type="button" class="quiet" aria-label="Earlier version" disabled=${isBusy || place === 0}
      onClick=${() => go(-1)}>‹</button> ${place + 1} of ${choices.length} ${" "}
    <button type="button" class="quiet" aria-label="Later version" disabled=${isBusy || place === choices.length - 1}
      onClick=${() => go(1)}>›</button></span>`;
}

function Editor({ text, onSave, onCancel }) {
  const [draft, set] = useState(text);
  const onKey = (event) => {
    if (event.key === "Escape") onCancel();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) onSave(draft);
  };
  return html`<div class="editor">
    <textarea aria-label="The message" rows=${Math.min(20, draft.split("\n").length + 1)} value=${draft}
      onInput=${(event) => set(event.target.value)} onKeyDown=${onKey} ref=${(area) => area && area.focus()}></textarea>
    <button type="button" onClick=${() => onSave(draft)}>Save as a branch</button>
    <button type="button" class="quiet" onClick=${onCancel}>Cancel</button></div>`;
}

function Call({ call }) {
  let text = call.text;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // Still on its way, or wrong: shown as it is.
  }
  return html`<div class="call"><b>calls ${call.name}</b><pre tabindex="0">${text}</pre></div>`;
}

// How far the prompt is computed, before the first token.
function PromptProgress({ total, processed, left_ms: left }) {
  const seconds = left === null ? "" : `, ${number.format(Math.ceil(left / 1000))} s left`;
  return html`<span class="cost"><progress max=${total} value=${processed} aria-label="The prompt"></progress>
    ${` ${number.format(processed)} of ${number.format(total)} prompt tokens${seconds}`}</span>`;
}

function Cost({ message }) {
  const { usage, seconds, finish, progress } = message;
  if (progress) return html`<${PromptProgress} ...${progress} />`;
  if (!seconds) return html`<span class="cost">…</span>`;
  const parts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${usage.prompt_tokens} prompt tokens, ${cached} cached`, `${usage.completion_tokens} tokens`);
    if (speed(message)) parts.push(`${number.format(speed(message))} tokens/s`);
  }
  if (seconds.first) parts.push(`first after ${seconds.first.toFixed(2)} s`);
  if (finish && finish !== "stop") parts.push(finish);
  return html`<span class="cost">${parts.join(" · ")}</span>`;
}
