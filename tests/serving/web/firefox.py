"""Debian's Firefox, driven by WebDriver BiDi over its own websocket: no driver lies between, and none is installed.

https://w3c.github.io/webdriver-bidi
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from websockets.sync.client import connect

FIREFOX = next(filter(None, map(shutil.which, ("firefox-esr", "firefox"))), None)
START_SECONDS = 90.0
ANSWER_SECONDS = 60.0
_LISTENS = re.compile(r"WebDriver BiDi listening on (ws://\S+)")
# Nothing is asked for beside the page.
PREFERENCES = """
user_pref("app.normandy.enabled", false);
user_pref("app.update.disabledForTesting", true);
user_pref("browser.safebrowsing.malware.enabled", false);
user_pref("browser.shell.checkDefaultBrowser", false);
user_pref("datareporting.policy.dataSubmissionEnabled", false);
user_pref("dom.disable_open_during_load", false);
user_pref("intl.accept_languages", "en-US");
user_pref("media.navigator.permission.disabled", true);
user_pref("media.navigator.streams.fake", true);
user_pref("network.captive-portal-service.enabled", false);
user_pref("network.connectivity-service.enabled", false);
user_pref("toolkit.telemetry.enabled", false);
"""


class Browser:
    """A running Firefox with a profile of its own."""

    def __init__(self, socket):
        self._socket = socket
        self._numbers = itertools.count(1)
        self.ask("session.new", {"capabilities": {}})

    def ask(self, method, params):
        """Sends a command, and returns its result; raises with what the browser says against it."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            reply = json.loads(self._socket.recv(timeout=ANSWER_SECONDS))
            if reply.get("id") == number:
                assert reply["type"] == "success", (method, reply)
                return reply["result"]

    def open(self, url):
        context = self.ask("browsingContext.create", {"type": "tab"})["context"]
        page = Page(self, context)
        page.goto(url)
        return page


class Page:
    """A tab."""

    def __init__(self, browser, context):
        self._browser = browser
        self._context = context

    def goto(self, url):
        self._browser.ask("browsingContext.navigate", {"context": self._context, "url": url, "wait": "complete"})

    def reload(self):
        self._browser.ask("browsingContext.reload", {"context": self._context, "wait": "complete"})

    def close(self):
        self._browser.ask("browsingContext.close", {"context": self._context})

    def offline(self, is_offline):
        condition = {"type": "offline"} if is_offline else None
        params = {"networkConditions": condition, "contexts": [self._context]}
        self._browser.ask("emulation.setNetworkConditions", params)

    def run(self, function, *given):
        """The value, as JSON has it, of a function of JavaScript called with such values."""
        result = self._browser.ask(
            "script.callFunction",
            {
                "functionDeclaration": f"async (given) => JSON.stringify(await ({function})(...JSON.parse(given)))",
                "arguments": [{"type": "string", "value": json.dumps(given)}],
                "target": {"context": self._context},
                "awaitPromise": True,
            },
        )
        assert result["type"] == "success", result
        return json.loads(result["result"].get("value", "null"))

    def text(self, selector):
        """Returns the text that the last element of a selector shows; empty while there is none."""
        return self.run("(selector) => [...document.querySelectorAll(selector)].at(-1)?.innerText ?? ''", selector)

    def press(self, name):
        """Clicks on the button of a name; returns False if there is none."""
        return self.run(
            """(name) => {
              const named = (one) => one.getAttribute("aria-label") ?? one.innerText.trim();
              const button = [...document.querySelectorAll("button")].find((one) => named(one) === name);
              button?.click();
              return Boolean(button);
            }""",
            name,
        )

    def type(self, label, text):
        """Writes into a field as a person does: with the keys of a keyboard."""
        self.run("(label) => document.querySelector(`[aria-label='${label}']`).focus()", label)
        keys = [{"type": kind, "value": one} for one in text for kind in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keyboard", "actions": keys}]
        self._browser.ask("input.performActions", {"context": self._context, "actions": actions})


@contextlib.contextmanager
def firefox():
    """A headless Firefox until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="tm-firefox-") as folder:
        (Path(folder) / "user.js").write_text(PREFERENCES)
        log = Path(folder) / "log"
        command = [
            FIREFOX,
            "--headless",
            "--no-remote",
            "--profile",
            folder,
            "--remote-debugging-port",
            "0",
            "about:blank",
        ]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, env=os.environ | {"HOME": folder})
        try:
            address = wait_for_address(process, log)
            with connect(f"{address}/session", max_size=None, open_timeout=ANSWER_SECONDS) as socket:
                yield Browser(socket)
        finally:
            process.terminate()
            process.wait()


def wait_for_address(process, log):
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if found := _LISTENS.search(log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.1)
    raise AssertionError(f"firefox does not listen: {log.read_text(errors='replace')[-2000:]}")
