// Long texts as passages, and which of them a question is about: BM25 (Robertson and Zaragoza, 2009, "The Probabilistic
// Relevance Framework") over words, and over pairs of characters where a script has no spaces between words.

import { breath } from "./ui.js";

// Characters of a passage at most; those of East Asia say more with each.
const LENGTH = 600;
const LENGTH_DENSE = 240;
const DENSE = /[\u2e80-\u9fff\uac00-\ud7af]/g;
const LOOKED_AT = 4000; // characters, at the beginning and in the middle
// Where a passage ends if it can, the best first.
const ENDS = ["\n\n", "\n", "。", ". ", "? ", "! ", " "];

const K = 1.2;
const B = 0.75;
// Hangul has spaces, but its words end in particles.
const SCRIPTS = ["Han", "Hiragana", "Katakana", "Hangul", "Thai", "Lao", "Khmer", "Myanmar"].map((name) => `\\p{scx=${name}}`).join("");
const LETTERS = "\\p{L}\\p{N}\\p{M}";
const RUNS = new RegExp(`([[${SCRIPTS}]&&[${LETTERS}]]+)|[[${LETTERS}]--[${SCRIPTS}]]+`, "gv");
const BREATH_MS = 10;
// The beginnings of words stand for their stems: in the languages of Europe that finds "preemption" by "preempted".
const STEM = 5;
const NONE = new Set();
// What questions are made of, whatever they are about; it would find passages that ask something.
const ASIDE = new Set(`a about an and are as at be been but by can could did do does for from had has have how i if in into is it its
  me my no not of on or say says she should so tell that the their them then there these they this to was we were what when where
  which who whom whose why will with would you your
  aber als am auch auf aus bei das dass dem den der des die du ein eine einem einen einer er es fur hat haben ich ihr im in ist kann
  man mit nach nicht nur oder sich sie sind und uber um von vom wann war warum was welche welchem welchen welcher welches wem wen wenn
  wer werden wessen wie wieso wir wird wo wofur wurde zu zum zur
  au aux avec ce ces cette combien comment dans de des du elle en est et etait il ils je la le les leur lui mais ne nous on ou
  par pas pour pourquoi quand que quel quelle quelles quels qui quoi sa se ses son sont sur tu un une vous
  al como con cual cuales cuando cuanta cuantas cuanto cuantos del donde el ella en era es esta este estos hay la las lo los no
  para pero por porque que quien quienes se si sin son su sus te una uno unos y
  什么 为什 怎么 如何 哪里 哪个 哪些 多少 这个 那个 是否 可以`.split(/\s+/));

// The places of the passages of a text, [from, to]: one after the other they are the text.
export function cut(text) {
  const half = Math.floor(text.length / 2);
  const most = [0, half].some((from) => isDense(text.slice(from, from + LOOKED_AT))) ? LENGTH_DENSE : LENGTH;
  const places = [];
  for (let from = 0; from < text.length;) {
    const to = endOf(text, from, most);
    places.push([from, to]);
    from = to;
  }
  return places;
}

const isDense = (text) => (text.match(DENSE)?.length ?? 0) > text.length / 4;

function endOf(text, from, most) {
  const last = from + most;
  if (last >= text.length) return text.length;
  const half = from + most / 2;
  const rest = text.slice(half, last);
  for (const mark of ENDS) {
    const at = rest.lastIndexOf(mark);
    if (at >= 0) return half + at + mark.length;
  }
  const isTorn = (text.charCodeAt(last) & 0xfc00) === 0xdc00; // the second half of a character
  return isTorn ? last - 1 : last;
}

// What is looked for: small letters without accents, and the beginnings of long words. Of scripts without spaces pairs, and
// in texts (`singles`) single characters too, since a question may be one. `aside`: words that are left out.
export function words(text, { singles = false, aside = NONE } = {}) {
  const found = [];
  const plain = text.normalize("NFKD").replaceAll(/[\u0300-\u036f]/g, "").normalize("NFC").toLowerCase();
  const take = (word) => aside.has(word) || found.push(word);
  for (const [run, dense] of plain.matchAll(RUNS)) {
    if (dense) {
      const characters = [...run];
      if (singles || characters.length === 1) found.push(...characters);
      for (let at = 1; at < characters.length; at += 1) take(characters[at - 1] + characters[at]);
    } else if (!aside.has(run)) {
      found.push(run);
      if (run.length > STEM) found.push(`${run.slice(0, STEM)}*`);
    }
  }
  return found;
}

// What of a text is searched: its passages, and for each word the passages that have it.
export class Index {
  constructor(text) {
    this.text = text;
    this.places = cut(text);
    this.lengths = []; // words of each passage
    this.postings = new Map(); // word -> [passage, how often, ...]
  }

  // Reads the text; the page can answer meanwhile.
  static async of(text) {
    const index = new Index(text);
    let rested = performance.now();
    for (let passage = 0; passage < index.places.length; passage += 1) {
      index.#read(passage);
      if (performance.now() - rested < BREATH_MS) continue;
      await breath();
      rested = performance.now();
    }
    return index;
  }

  #read(passage) {
    const found = words(this.text.slice(...this.places[passage]), { singles: true });
    const counts = new Map();
    for (const word of found) counts.set(word, (counts.get(word) ?? 0) + 1);
    for (const [word, count] of counts) {
      if (!this.postings.has(word)) this.postings.set(word, []);
      this.postings.get(word).push(passage, count);
    }
    this.lengths.push(found.length);
  }
}

const sum = (numbers) => numbers.reduce((total, one) => total + one, 0);

function wantedOf(question) {
  const own = words(question, { aside: ASIDE });
  return new Set(own.length ? own : words(question));
}

// [{which, passage, score}] of all passages that have a word of the question, the best first; `which`: of the indexes.
export function rank(indexes, question) {
  const total = sum(indexes.map(({ lengths }) => lengths.length));
  const average = Math.max(1, sum(indexes.map(({ lengths }) => sum(lengths))) / Math.max(1, total));
  const scores = indexes.map(({ lengths }) => new Float64Array(lengths.length));
  for (const word of wantedOf(question)) {
    const lists = indexes.map(({ postings }) => postings.get(word) ?? []);
    const holders = sum(lists.map(({ length }) => length / 2));
    const weight = Math.log(1 + (total - holders + 0.5) / (holders + 0.5));
    lists.forEach((list, which) => {
      for (let at = 0; at < list.length; at += 2) {
        const [passage, count] = [list[at], list[at + 1]];
        const length = indexes[which].lengths[passage] / average;
        scores[which][passage] += (weight * count * (K + 1)) / (count + K * (1 - B + B * length));
      }
    });
  }
  const found = [];
  for (const [which, list] of scores.entries()) list.forEach((score, passage) => score > 0 && found.push({ which, passage, score }));
  return found.sort((one, other) => other.score - one.score || one.which - other.which || one.passage - other.passage);
}
