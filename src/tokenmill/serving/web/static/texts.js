// The texts of the page: each has a name, under which the table of each language has it (texts/*.js). The browser's
// language decides, until somebody chooses another; what the server says is English.

export const LANGUAGES = { en: "English", de: "Deutsch", zh: "中文", fr: "Français", es: "Español" };
const NAME = "tokenmill-language";

function chosen() {
  try {
    return localStorage.getItem(NAME);
  } catch {
    return null; // storage is switched off
  }
}

const wanted = [chosen(), ...navigator.languages.map((tag) => tag.split("-")[0].toLowerCase())];
export const language = wanted.find((name) => Object.hasOwn(LANGUAGES, name)) ?? "en";
const { default: table } = await import(`./texts/${language}.js`);
document.documentElement.lang = language;

export function setLanguage(name) {
  localStorage.setItem(NAME, name);
  location.reload(); // an answer that is being written goes on
}

// The text of a name, with values where it has {places} for them.
export function t(name, values = {}) {
  const text = table[name];
  if (text === undefined) throw new Error(`no text is called ${name}`);
  return text.replace(/\{(\w+)\}/g, (whole, place) => (place in values ? String(values[place]) : whole));
}

// The same as a list, for values that are more than text: parts of a page.
export function parts(name, values) {
  return t(name).split(/\{(\w+)\}/).map((part, index) => (index % 2 ? values[part] : part));
}

export const number = new Intl.NumberFormat(language, { maximumFractionDigits: 1 });
