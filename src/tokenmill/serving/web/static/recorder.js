// The microphone, for models that take sound: what is said becomes a file of the message (WAV, 16 kHz, one channel), and
// nobody but the model hears it.

import { language, t } from "./texts.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const RATE = 16_000;
// If the server does not say how long a clip may be.
const MOST_SECONDS = 30;
const HEADER_BYTES = 44;
const DEEPEST = 0x7fff;

// Samples within -1 and 1 as a file of 16 bits each (RIFF WAVE, format 1).
export function wav(samples) {
  const view = new DataView(new ArrayBuffer(HEADER_BYTES + 2 * samples.length));
  const text = (at, value) => [...value].forEach((one, index) => view.setUint8(at + index, one.charCodeAt(0)));
  const count = (at, value) => view.setUint32(at, value, true);
  const short = (at, value) => view.setUint16(at, value, true);
  text(0, "RIFF");
  count(4, view.byteLength - 8);
  text(8, "WAVEfmt ");
  count(16, 16); // bytes of this part
  short(20, 1); // plain samples
  short(22, 1); // channels
  count(24, RATE);
  count(28, 2 * RATE); // bytes a second
  short(32, 2); // bytes of all channels at a time
  short(34, 16); // bits
  text(36, "data");
  count(40, 2 * samples.length);
  samples.forEach((value, index) => view.setInt16(HEADER_BYTES + 2 * index, Math.max(-1, Math.min(1, value)) * DEEPEST, true));
  return view.buffer;
}

// What a browser has recorded, in whatever form it does, as such a file of at most so many seconds.
async function fileOf(blob, mostSeconds) {
  const context = new OfflineAudioContext(1, 1, RATE); // decodes to its own rate
  const sound = await context.decodeAudioData(await blob.arrayBuffer());
  const mixed = new Float32Array(Math.min(sound.length, Math.floor(mostSeconds * RATE)));
  for (let channel = 0; channel < sound.numberOfChannels; channel += 1) {
    const values = sound.getChannelData(channel);
    for (let at = 0; at < mixed.length; at += 1) mixed[at] += values[at] / sound.numberOfChannels;
  }
  const time = new Date().toLocaleTimeString(language, { hour: "2-digit", minute: "2-digit", second: "2-digit" }).replaceAll(":", ".");
  return new File([wav(mixed)], t("voice.name", { time }), { type: "audio/wav" });
}

// Records until what it returns is called; the file of it goes to `done`, or why there is none to `fail`.
async function record(mostSeconds, done, fail) {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const recorder = new MediaRecorder(stream);
  const pieces = [];
  recorder.ondataavailable = ({ data }) => pieces.push(data);
  recorder.onstop = async () => {
    for (const track of stream.getTracks()) track.stop();
    try {
      done(await fileOf(new Blob(pieces, { type: recorder.mimeType }), mostSeconds));
    } catch (error) {
      fail(error);
    }
  };
  // Sound comes a moment after the start: a recording that ends before it holds none.
  await new Promise((resolve, reject) => {
    recorder.onstart = resolve;
    recorder.onerror = ({ error }) => reject(error);
    recorder.start();
  });
  return () => recorder.state !== "inactive" && recorder.stop();
}

// The button; `mostSeconds`: of a clip, then it ends by itself.
export function Microphone({ mostSeconds, take, fail }) {
  const [seconds, setSeconds] = useState(-1);
  const end = useRef(null);
  const isOver = useRef(false);
  const isAsking = useRef(false);
  const most = mostSeconds || MOST_SECONDS;
  const isOn = seconds >= 0;
  const stop = () => {
    end.current?.();
    end.current = null;
    setSeconds(-1);
  };
  // Before the page is drawn: behind the word to stop, a slow one would count on.
  useLayoutEffect(() => {
    if (!isOn) return undefined;
    const timer = setTimeout(() => (seconds + 1 >= most ? stop() : setSeconds(seconds + 1)), 1000);
    return () => clearTimeout(timer);
  }, [seconds]);
  useEffect(() => () => {
    isOver.current = true; // what was said for a conversation that is left goes nowhere
    end.current?.();
  }, []);
  const refuse = (error) => fail(t("voice.refused", { reason: error.message }));
  const begin = async () => {
    if (!isSecureContext) {
      fail(t("voice.insecure"));
      return;
    }
    if (isAsking.current) return; // a second click, while the browser asks whether it may
    isAsking.current = true;
    try {
      const finish = await record(most, (file) => !isOver.current && take(file), refuse);
      if (isOver.current) finish();
      else {
        end.current = finish;
        setSeconds(0);
      }
    } catch (error) {
      refuse(error);
    }
    isAsking.current = false;
  };
  return html`<button type="button" class=${isOn ? "stop" : "quiet"} aria-pressed=${isOn} title=${isSecureContext ? undefined : t("voice.insecure")}
      onClick=${isOn ? stop : begin}>${isOn ? t("voice.stop", { seconds }) : t("voice.record")}</button>
    <span class="unseen" role="status">${isOn ? t("voice.recording") : ""}</span>`;
}
