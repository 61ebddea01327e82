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

// What is looked for: small letters without accents. Of scripts without spaces pairs, and in texts (`withSingles`)
// single characters too, since a question may be one.
export function words(text, withSingles) {
  const found = [];
  const plain = text.normalize("NFKD").replaceAll(/[\u0300-\u036f]/g, "").normalize("NFC").toLowerCase();
  for (const [run, dense] of plain.matchAll(RUNS)) {
    if (!dense) {
      found.push(run);
      continue;
    }
    const characters = [...run];
    if (withSingles || characters.length === 1) found.push(...characters);
    for (let at = 1; at < characters.length; at += 1) found.push(characters[at - 1] + characters[at]);
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
    const found = words(this.text.slice(...this.places[passage]), true);
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

// [{which, passage, score}] of all passages that have a word of the question, the best first; `which`: of the indexes.
export function rank(indexes, question) {
  const total = sum(indexes.map(({ lengths }) => lengths.length));
  const average = Math.max(1, sum(indexes.map(({ lengths }) => sum(lengths))) / Math.max(1, total));
  const scores = indexes.map(({ lengths }) => new Float64Array(lengths.length));
  for (const word of new Set(words(question, false))) {
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
