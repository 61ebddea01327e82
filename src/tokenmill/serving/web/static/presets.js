// Presets: settings under a name, kept by this browser. One is taken over as it is; what is changed then concerns the
// conversation alone, until it is saved.

import { t } from "./texts.js";
import { html, useState } from "./ui.js";

const NAME = "tokenmill-presets";

export const presets = {
  // {name: settings}
  all() {
    try {
      return Object(JSON.parse(localStorage.getItem(NAME) ?? "{}"));
    } catch {
      return {}; // storage is switched off, or damaged
    }
  },
  put: (name, settings) => write({ ...presets.all(), [name]: settings }),
  remove(name) {
    const { [name]: gone, ...rest } = presets.all();
    write(rest);
  },
};

function write(all) {
  localStorage.setItem(NAME, JSON.stringify(all));
}

export function Presets({ settings, change }) {
  const [name, setName] = useState("");
  const [problem, fail] = useState("");
  const [all, setAll] = useState(presets.all);
  const take = (event) => {
    const chosen = event.target.value;
    setName(chosen);
    if (chosen) change({ ...all[chosen] });
  };
  const steer = (act) => {
    try {
      act();
      fail("");
    } catch (error) {
      fail(t("store.notKept", { error: error.message }));
    }
    setAll(presets.all());
  };
  const save = (event) => {
    event.preventDefault();
    if (name.trim()) steer(() => presets.put(name.trim(), settings));
  };
  return html`<form class="presets" onSubmit=${save}>
    <label>${t("presets.choose")}<select value=${Object.hasOwn(all, name) ? name : ""} onChange=${take}><option value="">${t("presets.none")}</option>
      ${Object.keys(all).sort().map((one) => html`<option key=${one} value=${one}>${one}</option>`)}</select></label>
    <label>${t("presets.name")}<input value=${name} onInput=${(event) => setName(event.target.value)} /></label>
    <span class="row"><button type="submit" class="quiet" disabled=${!name.trim()}>${t("presets.save")}</button>
      <button type="button" class="quiet" disabled=${!Object.hasOwn(all, name.trim())} onClick=${() => steer(() => presets.remove(name.trim()))}>
        ${t("presets.delete")}</button></span>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}</form>`;
}
