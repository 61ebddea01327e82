"""Answers read aloud, and questions that are spoken: by voices of this device, and to models that take sound."""

import base64
import io
import wave
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.audio_checkpoints import make_audio_checkpoint
from tests.serving.server.running_server import start_server
from tests.serving.web.test_browser import answers, ask, open_settings, until, wait_for_end
from tests.serving.web.test_everybody import serious
from tests.serving.web.test_texts import told  # noqa: F401
from tokenmill.config.configs import EngineConfig
from tokenmill.serving.replicas.starter import ENGINE_MODULE

# A synthesis that says nothing, and ends a part when the test says so.
VOICES = """([voices]) => {
  const spoken = (globalThis.spoken = { parts: [], cancels: 0, end: () => spoken.parts.at(-1).onend() });
  globalThis.SpeechSynthesisUtterance = class { constructor(text) { this.text = text; } };
  Object.defineProperty(globalThis, "speechSynthesis", { value: {
    getVoices: () => voices.map(([name, lang, localService]) => ({ name, lang, localService, default: name === "Home" })),
    speak: (part) => spoken.parts.push(part),
    cancel: () => { spoken.cancels += 1; },
  } });
}"""
"""
"""
