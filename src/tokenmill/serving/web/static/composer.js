// The box that asks, and gives the results of calls.

import { Images } from "./message.js";
import { FileButton, html, useEffect, useRef, useState } from "./ui.js";

export function Composer({ desk, last, takesImages, isShown, onSend }) {
  const [results, setResults] = useState([]);
  const box = useRef();
  const { writes, draft, images } = desk;
  const calls = last?.role === "assistant" && !writes ? last.calls ?? [] : [];
  useFocus(box, isShown, desk.open);
  const send = (event) => {
    event?.preventDefault();
    if (writes) return;
    if (calls.length) {
      desk.give(calls, results);
      setResults([]);
    } else if (draft.trim() || images.length) {
      desk.send(draft, images);
    } else {
      return;
    }
    onSend();
  };
  // Images come by the button, dropped or pasted; where the model takes none, files go where they always went.
  const takeFrom = (transfer) => (event) => {
    const files = [...(event[transfer]?.files ?? [])];
    if (!takesImages || !files.length) return;
    event.preventDefault();
    desk.addImages(files);
  };
  const remove = (index) => {
    images.splice(index, 1);
    desk.redraw();
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`<form class="composer" onSubmit=${send} onPaste=${takeFrom("clipboardData")}
      onDrop=${takeFrom("dataTransfer")} onDragOver=${(event) => takesImages && event.preventDefault()}>
    <${Images} urls=${images} remove=${remove} />
    ${calls.length > 0 ? calls.map((call, index) => html`<label key=${call.id}>Result of ${call.name}
        <textarea rows="2" value=${results[index] ?? ""}
          onInput=${(event) => setResults(Object.assign([...results], { [index]: event.target.value }))}></textarea></label>`)
      : html`<textarea ref=${box} aria-label="Your message" placeholder="Your message"
          rows=${Math.min(8, draft.split("\n").length)} value=${draft}
          onInput=${(event) => desk.setDraft(event.target.value)} onKeyDown=${onKey}></textarea>`}
    ${takesImages && !calls.length && html`<${FileButton} label="Add an image" accept="image/*"
      onFile=${(file) => desk.addImages([file])} />`}
    ${writes === "here" ? html`<button type="button" class="stop" onClick=${() => desk.stop()}>Stop</button>`
      : writes ? html`<span class="hint" role="status">Written by another tab</span>`
      : html`<button type="submit">Send</button>`}
  </form>`;
}

// One can type at once; where that would bring a keyboard up over half of the screen, only after a touch. Whoever goes
// through the list by keys stays there, until a new conversation begins.
function useFocus(box, isShown, { id, messages }) {
  useEffect(() => {
    const isElsewhere = messages.length > 0 && document.activeElement?.closest(".list, .drawer, dialog");
    if (isShown && !isElsewhere && !matchMedia("(pointer: coarse)").matches) box.current?.focus();
  }, [isShown, id]);
}
