// The box that asks, and gives the results of calls.

import { accepted, Files } from "./attachments.js";
import { Images } from "./message.js";
import { Microphone } from "./recorder.js";
import { t } from "./texts.js";
import { FileButton, html, useLayoutEffect, useRef, useState } from "./ui.js";

export function Composer({ desk, last, isShown, onSend }) {
  const [results, setResults] = useState([]);
  const box = useRef();
  const { writes, draft, images, files, model } = desk;
  const calls = last?.role === "assistant" && !writes ? last.calls ?? [] : [];
  useFocus(box, isShown, desk.open);
  const send = (event) => {
    event?.preventDefault();
    if (writes) return;
    if (calls.length) {
      desk.give(calls, results);
      setResults([]);
    } else if (draft.trim() || images.length || files.length) {
      desk.send(draft, images, files);
    } else {
      return;
    }
    onSend();
  };
  // Files come by the button, dropped or pasted.
  const takeFrom = (transfer) => (event) => {
    const found = [...(event[transfer]?.files ?? [])];
    if (!found.length) return;
    event.preventDefault();
    desk.addFiles(found);
  };
  const remove = (list) => (index) => desk.removeFile(list, index);
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`<form class="composer" onSubmit=${send} onPaste=${takeFrom("clipboardData")}
      onDrop=${takeFrom("dataTransfer")} onDragOver=${(event) => event.preventDefault()}>
    <${Images} urls=${images} remove=${remove(images)} />
    <${Files} files=${files} remove=${remove(files)} />
    ${calls.length > 0 ? calls.map((call, index) => html`<label key=${call.id}>${t("message.result", { name: call.name })}
        <textarea rows="2" value=${results[index] ?? ""}
          onInput=${(event) => setResults(Object.assign([...results], { [index]: event.target.value }))}></textarea></label>`)
      : html`<textarea ref=${box} aria-label=${t("composer.label")} placeholder=${t("composer.label")}
          rows=${Math.min(8, draft.split("\n").length)} value=${draft}
          onInput=${(event) => desk.setDraft(event.target.value)} onKeyDown=${onKey}></textarea>`}
    ${!calls.length && html`<${FileButton} label=${t(model.takesImages ? "composer.image" : "composer.file")} accept=${accepted(model)}
      onFile=${(file) => desk.addFiles([file])} />`}
    ${!calls.length && model.takesSound && html`<${Microphone} key=${desk.open.id} mostSeconds=${model.mostSeconds}
      take=${(file) => desk.addFiles([file])} fail=${(text) => desk.fail(text)} />`}
    ${writes === "here" ? html`<button type="button" class="stop" onClick=${() => desk.stop()}>${t("composer.stop")}</button>`
      : writes ? html`<span class="hint" role="status">${t("composer.elsewhere")}</span>`
      : html`<button type="submit">${t("composer.send")}</button>`}
  </form>`;
}

// One can type at once; where that would bring a keyboard up over half of the screen, only after a touch. Whoever goes
// through the list by keys stays there, until a new conversation begins. Before the page is drawn: a slow one would take
// the focus from where somebody has gone meanwhile.
function useFocus(box, isShown, { id, messages }) {
  useLayoutEffect(() => {
    const isElsewhere = messages.length > 0 && document.activeElement?.closest(".list, .drawer, dialog");
    if (isShown && !isElsewhere && !matchMedia("(pointer: coarse)").matches) box.current?.focus();
  }, [isShown, id]);
}
