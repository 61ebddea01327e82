"""Find the requests to blame for the deaths of engines and text workers, and track the suspects on trial."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenmill.core.part_messages import Verdict
from tokenmill.ipc.crash_attribution import CrashAttribution, page_path, running_at_death
from tokenmill.serving.replicas.work_page import Work, work_at_death


class Trials:
    """Reads the pages of dead parts. A text worker's suspects are its own: no other worker prepares them."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the folder of the pages."""
        self._folder = folder
        self._engines = CrashAttribution()
        self._workers: dict[str, CrashAttribution] = {}

    @property
    def under_trial(self) -> list[str]:
        """Names of the parts whose suspects are on trial, as messages call them."""
        suspicions = (self._engines, *self._workers.values())
        return list(dict.fromkeys(called for one in suspicions for called in one.under_trial))

    def clear(self, ids: Iterable[str]) -> None:
        """Clear requests that have proved harmless or have ended."""
        ids = list(ids)
        for suspicion in (self._engines, *self._workers.values()):
            suspicion.clear(ids)

    def forget_engines(self) -> None:
        """Forget the suspects of engines after the death of a text worker, which alone knew their trials."""
        self._engines.clear()

    def forget_worker(self, inbox: str, called: str) -> None:
        """Forget a text worker that was ended on purpose: no request is to blame."""
        self._workers.pop(called, None)
        page_path(self._folder, inbox).unlink(missing_ok=True)

    def died(self, inbox: str, called: str, is_engine: bool) -> Verdict:
        """Return the verdict on the requests that a part was working on when it died; `inbox` names its page."""
        page = page_path(self._folder, inbox)
        if is_engine:
            return Verdict(*self._engines.died(running_at_death(page), called))
        suspicion = self._workers.setdefault(called, CrashAttribution())
        before = suspicion.suspects
        suspects, convicted = suspicion.died([one.id for one in work_at_death(page)], called)
        # Those whose turn to be tried had not come stay under suspicion.
        return Verdict([*suspects, *sorted(before.difference(suspects, convicted))], convicted)

    def work_of(self, inbox: str) -> str:
        """Return a text worker's work at its death, as the rest of a sentence."""
        return sentence(work_at_death(page_path(self._folder, inbox)))


def sentence(work: Iterable[Work]) -> str:
    """Return the rest of a sentence after "was killed"; empty without any work."""
    named = " and ".join(f"{one.did} request {one.id}" for one in work)
    return f" while it {named}" if named else ""
