"""Ask the same question over and over, with an own key, while another client attacks the server."""

from __future__ import annotations

import threading

import httpx

from tests.eventually import patience

BODY = {
    "prompt": "what the bystander wants to know",
    "max_tokens": 24,
    "temperature": 0,
    "seed": 1,
    "request_id": "bystander",
}
# Seconds between an answer and the next question: somebody who never rests takes a processor of every attack.
PAUSE = 0.1


class Bystander:
    """Asks in a thread from `__enter__` to `__exit__`, which fails if any answer was refused, late or another one."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=patience(20))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, name="bystander")
        self.answers: list[str] = []
        self.trouble: list[str] = []

    def __enter__(self) -> Bystander:
        self.answers.append(self._ask())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._http.close()
        assert self.trouble == []
        assert set(self.answers) == {self.answers[0]}, "another's request has changed an answer"
        assert len(self.answers) > 1, "nobody was there while it went on"

    def _ask(self) -> str:
        reply = self._http.post("/v1/completions", json=BODY)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]["text"]

    def _ask_on(self) -> None:
        try:
            while not (self._stop.is_set() and len(self.answers) > 1):
                self.answers.append(self._ask())
                self._stop.wait(PAUSE)
        except (AssertionError, httpx.HTTPError) as error:
            self.trouble.append(repr(error))
