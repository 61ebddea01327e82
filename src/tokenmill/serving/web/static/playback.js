// Plays a step log: its steps come as they came then, faster or slower, from wherever somebody puts the slider.

import { EngineView, seconds } from "./engine_view.js";
import { t } from "./texts.js";
import { html, useLayoutEffect, useMemo, useState } from "./ui.js";

const SPEEDS = [0.1, 0.25, 0.5, 1, 2, 4, 16, 64];
const FRAME_MS = 50;

// A log and the moment of it that is shown: all turns that had begun by then are in its view.
class Playback {
  #next = 0;

  constructor({ turns, ready }) {
    Object.assign(this, { turns, ready });
    this.begin = turns[0].at;
    this.end = turns.at(-1).at + turns.at(-1).schedule + turns.at(-1).run + turns.at(-1).commit;
    this.#rewind();
    this.seek(this.end);
  }

  #rewind() {
    this.view = Object.assign(new EngineView(0), { isFile: true, ready: this.ready });
    this.#next = 0;
  }

  seek(at) {
    this.at = Math.min(this.end, Math.max(this.begin, at));
    if (this.at < this.view.now) this.#rewind();
    while (this.#next < this.turns.length && this.turns[this.#next].at <= this.at) {
      this.view.takeTurn({ ...this.turns[this.#next] });
      this.#next += 1;
    }
    this.view.now = this.at;
    this.view.horizon = this.begin;
  }
}

export function usePlayback(opened, draw) {
  const playback = useMemo(() => opened && new Playback(opened.log), [opened]);
  const [speed, setSpeed] = useState(1);
  const [isPlaying, play] = useState(false);
  // Before the page is drawn: a slow one would play on behind the word to hold, or hold behind the word to play.
  useLayoutEffect(() => play(false), [playback]);
  useLayoutEffect(() => {
    if (!playback || !isPlaying) return undefined;
    let before = performance.now();
    const timer = setInterval(() => {
      const now = performance.now();
      playback.seek(playback.at + ((now - before) / 1000) * speed);
      before = now;
      if (playback.at >= playback.end) play(false);
      draw();
    }, FRAME_MS);
    return () => clearInterval(timer);
  }, [playback, isPlaying, speed]);
  const seek = (at) => {
    playback.seek(at);
    draw();
  };
  const toggle = () => {
    if (!isPlaying && playback.at >= playback.end) seek(playback.begin);
    play(!isPlaying);
  };
  return { ...playback, seek, speed, setSpeed, isPlaying, toggle };
}

export function PlaybackBar({ playback: { at, begin, end, seek, speed, setSpeed, isPlaying, toggle } }) {
  const told = `${seconds(at - begin)} / ${seconds(end - begin)}`;
  return html`<div class="playback" role="group" aria-label=${t("playback.label")}>
    <button type="button" onClick=${toggle}>${isPlaying ? t("playback.pause") : t("playback.play")}</button>
    <input type="range" min="0" max=${end - begin} step="any" value=${at - begin} aria-label=${t("playback.moment")} aria-valuetext=${told}
      onInput=${(event) => seek(begin + Number(event.target.value))} />
    <span class="hint">${told}</span>
    <label class="speed">${t("playback.speed")}<select value=${speed} onChange=${(event) => setSpeed(Number(event.target.value))}>
      ${SPEEDS.map((one) => html`<option key=${one} value=${one}>${one} ×</option>`)}</select></label></div>`;
}
