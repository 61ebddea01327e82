"""Answers read aloud by voices of this device, and questions spoken to models that take sound."""

import base64
import io
import json
import wave

import numpy as np
import pytest

from tests.audio_checkpoints import make_audio_checkpoint
from tests.serving.server.running_server import start_server
from tests.serving.web.test_browser import answers, ask, hold_clock, open_settings, until, wait_for_end
from tests.serving.web.test_everybody import serious
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

# A synthesis that says nothing aloud; a part ends when the test says so.
SYNTHESIS = """(() => {
  const spoken = (globalThis.spoken = { parts: [], cancels: 0, end: () => spoken.parts.at(-1).onend() });
  globalThis.SpeechSynthesisUtterance = class { constructor(text) { this.text = text; } };
  const voices = VOICES.map(([name, lang, localService]) => ({ name, lang, localService, default: false }));
  Object.defineProperty(globalThis, "speechSynthesis", { value: {
    getVoices: () => voices,
    speak: (part) => spoken.parts.push(part),
    cancel: () => { spoken.cancels += 1; },
  } });
})()"""
FOREIGN = ("Far away", "en-US", False)
OWN = ("At home", "en-GB", True)
GERMAN = ("Zu Hause", "de-DE", True)
ANSWER = """# The mill

It **grinds** grain. Is it old?

- one
- two

```python
unspoken = 1
```

And $x^2$ ends it."""


@pytest.fixture
def reading(echo, open_page):
    """Opens a page with such voices, where the model has answered."""

    def open_(*voices, **how):
        page = open_page(f"{echo.url}/web/icon.svg", **how)
        page.add_init_script(SYNTHESIS.replace("VOICES", json.dumps(voices)))
        page.goto(echo.url)
        events = [{"choices": [{"index": 0, "delta": {"content": ANSWER}, "finish_reason": "stop"}]}]
        lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=lines),
        )
        ask(page, "tell")
        answers(page).get_by_role("button", name="Read aloud").wait_for()
        return page

    return open_


def test_an_answer_is_read_aloud_by_a_voice_of_this_device(reading):
    page = reading(FOREIGN, GERMAN, OWN)
    answers(page).locator(".katex").first.wait_for()
    button = answers(page).get_by_role("button", name="Read aloud")
    button.focus()
    page.keyboard.press("Enter")
    stop = answers(page).get_by_role("button", name="Stop reading")
    stop.wait_for()
    parts = page.evaluate("spoken.parts.map(({ text, voice, lang }) => [text, voice.name, lang])")
    said = [text for text, _, _ in parts]
    assert said[:5] == ["The mill", "It grinds grain.", "Is it old?", "one", "two"]
    assert said[-1].startswith("And ") and said[-1].endswith("ends it.")
    assert "unspoken" not in " ".join(said)
    assert {(name, lang) for _, name, lang in parts} == {("At home", "en-GB")}
    assert stop.get_attribute("aria-pressed") == "true"
    assert serious(page) == []
    page.evaluate("spoken.end()")
    button.wait_for()
    button.click()
    stop.click()
    button.wait_for()
    cancels = page.evaluate("spoken.cancels")
    button.click()
    page.get_by_role("button", name="New conversation").click()
    until(page, lambda: page.evaluate("spoken.cancels") > cancels + 1)


def test_a_device_without_a_voice_of_its_own_says_so(reading):
    page = reading(FOREIGN, GERMAN)
    answers(page).get_by_role("button", name="Read aloud").click()
    page.get_by_role("alert").get_by_text("no voice of its own").wait_for()
    assert page.evaluate("spoken.parts.length") == 0


def test_the_language_of_the_page_decides_the_voice(reading):
    page = reading(OWN, GERMAN)
    page.get_by_role("combobox", name="Language").select_option("de")
    answers(page).get_by_role("button", name="Vorlesen").click()
    assert set(page.evaluate("spoken.parts.map(({ voice }) => voice.name)")) == {"Zu Hause"}


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    """A server of a model that takes clips of two seconds of sound."""
    model = make_audio_checkpoint(tmp_path_factory.mktemp("hearing") / "model")
    config = EngineConfig(model=str(model), dtype="float32", num_pages=200, max_num_seqs=4)
    with start_server(config, ENGINE_MODULE, served_model_name=("hearing",)) as server:
        yield server


# Stops the recording after a moment: by the page's own clock, since it ends by itself after two seconds.
STOP = """(button) => new MutationObserver((_, observer) => {
  observer.disconnect();
  setTimeout(() => button.click(), 700);
}).observe(button, { attributeFilter: ["aria-pressed"] })"""


def test_what_is_said_is_sent_as_sound(hearing, open_page):
    page = open_page(hearing.url, permissions=["microphone"])
    record = page.get_by_role("button", name="Record", exact=True)
    record.evaluate(STOP)
    record.focus()
    page.keyboard.press("Enter")
    composer = page.locator("form.composer")
    composer.locator(".file").get_by_text(".wav").wait_for()
    page.get_by_role("button", name="Record", exact=True).wait_for()
    open_settings(page)
    page.get_by_label("Most tokens of an answer").fill("4")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, "what do you hear")
    part = sent.value.post_data_json["messages"][-1]["content"][0]
    kind, _, data = part["audio_url"]["url"].partition(",")
    assert kind == "data:audio/wav;base64"
    with wave.open(io.BytesIO(base64.b64decode(data))) as sound:
        assert (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) == (16_000, 1, 2)
        samples = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
    assert 4_000 < len(samples) <= 32_000
    assert np.abs(samples).max() > 500, "the fake microphone beeps"
    wait_for_end(page)
    assert "tokens" in answers(page).locator(".cost").inner_text()


def endless_clips(route):
    """Let a recording not end by itself."""
    reply = route.fetch()
    info = reply.json()
    info["engine"]["max_clip_seconds"] = 10_000
    route.fulfill(response=reply, json=info)


def recording_page(hearing, open_page):
    """A page whose recordings do not end by themselves, and its button."""
    page = open_page(hearing.url, permissions=["microphone"])
    page.route("**/server_info*", endless_clips)
    page.reload()
    record = page.get_by_role("button", name="Record", exact=True)
    record.wait_for()
    return page, record


def test_a_recording_that_is_stopped_as_soon_as_it_records_is_a_clip(hearing, open_page):
    page, record = recording_page(hearing, open_page)
    record.evaluate(STOP.replace("700", "0"))
    record.click()
    page.locator("form.composer .file").get_by_text(".wav").wait_for()


def test_everybody_hears_and_sees_that_it_records(hearing, open_page):
    page, record = recording_page(hearing, open_page)
    record.click()
    stop = page.get_by_role("button", name="Stop recording")
    stop.wait_for()
    assert serious(page) == []
    stop.click()
    page.locator("form.composer .file").get_by_text(".wav").wait_for()


def test_a_recording_ends_with_the_longest_clip_that_the_model_takes(hearing, open_page):
    page = open_page(hearing.url, permissions=["microphone"])
    page.get_by_role("button", name="Record", exact=True).click()
    page.locator("form.composer .file").get_by_text(".wav").wait_for()
    page.get_by_role("button", name="Record", exact=True).wait_for()


def test_a_second_click_while_the_browser_asks_opens_no_second_recording(hearing, open_page):
    page, record = recording_page(hearing, open_page)
    page.evaluate("""() => {
      const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
      globalThis.asked = 0;
      navigator.mediaDevices.getUserMedia = (wanted) => { globalThis.asked += 1; return ask(wanted); };
    }""")
    record.evaluate("(button) => { button.click(); button.click(); }")
    page.get_by_role("button", name="Stop recording").click()
    page.locator("form.composer .file").get_by_text(".wav").wait_for()
    assert page.evaluate("globalThis.asked") == 1


def test_a_page_that_is_drawn_seldom_counts_no_seconds_behind_a_stop(hearing, open_page):
    page, record = recording_page(hearing, open_page)
    hold_clock(page)
    page.evaluate("() => { globalThis.requestAnimationFrame = (work) => setTimeout(work, 90); }")
    page.evaluate("() => { globalThis.cancelAnimationFrame = clearTimeout; }")
    record.click()
    stop = page.get_by_role("button", name="Stop recording")
    stop.wait_for()
    page.clock.run_for(1050)
    stop.click()
    page.clock.run_for(200)
    page.locator("form.composer .file").get_by_text(".wav").wait_for()
    assert (record.count(), stop.count()) == (1, 0)


def test_a_microphone_that_is_refused_is_said(hearing, open_page):
    page = open_page(hearing.url)
    refuse = 'navigator.mediaDevices.getUserMedia = () => Promise.reject(new DOMException("no", "NotAllowedError"))'
    page.evaluate(f"() => {{ {refuse}; }}")
    page.get_by_role("button", name="Record", exact=True).click()
    page.get_by_role("alert").get_by_text("There is no recording: no").wait_for()


def test_where_browsers_give_no_microphone_the_button_says_so(hearing, open_page):
    page = open_page(hearing.url.replace("127.0.0.1", "mill.local"))
    button = page.get_by_role("button", name="Record", exact=True)
    assert "over https or on localhost" in button.get_attribute("title")
    button.click()
    page.get_by_role("alert").get_by_text("over https or on localhost").wait_for()


def test_a_model_of_texts_is_not_spoken_to(echo, open_page):
    page = open_page(echo.url)
    ask(page, "hello")
    wait_for_end(page)
    assert page.get_by_role("button", name="Record", exact=True).count() == 0


SAMPLES = [0, 0.5, -0.5, 1, -1, 2, -2]


def test_samples_are_written_as_a_wave_file(echo, open_page):
    page = open_page(echo.url)
    page.get_by_label("Your message").wait_for()
    content = page.evaluate(
        """async (samples) => {
          const { wav } = await import("/web/recorder.js");
          return [...new Uint8Array(wav(Float32Array.from(samples)))];
        }""",
        SAMPLES,
    )
    with wave.open(io.BytesIO(bytes(content))) as sound:
        assert sound.getparams()[:4] == (1, 2, 16_000, len(SAMPLES))
        written = np.frombuffer(sound.readframes(len(SAMPLES)), np.int16)
    assert written == pytest.approx(np.clip(SAMPLES, -1, 1) * 32767, abs=1)
