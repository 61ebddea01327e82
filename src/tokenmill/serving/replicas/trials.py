"""Who is to blame for the deaths of engines and text workers, and who is still to be tried alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenmill.core.part_messages import Verdict
from tokenmill.ipc.suspects import Suspicion, page_path, running_at_death
from tokenmill.serving.replicas.work_page import Work, work_at_death


class Trials:
    """Reads the pages of the dead. A text worker's suspects are its own: no other prepares them."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where the pages lie."""
        self._folder = folder
        self._engines = Suspicion()
        self._workers: dict[str, Suspicion] = {}

    @property
    def under_trial(self) -> list[str]:
        """What sentences call the parts whose suspects are tried."""
        suspicions = (self._engines, *self._workers.values())
        return list(dict.fromkeys(called for one in suspicions for called in one.under_trial))

    def clear(self, ids: Iterable[str]) -> None:
        """These have done no harm, or have ended."""
        ids = list(ids)
        for suspicion in (self._engines, *self._workers.values()):
            suspicion.clear(ids)

    def forget_engines(self) -> None:
        """A text worker has died: it alone knew how the suspects of engines were doing."""
        self._engines.clear()

    def forget_worker(self, inbox: str, called: str) -> None:
        """A text worker is ended with all that it has: nobody is to blame."""
        self._workers.pop(called, None)
        page_path(self._folder, inbox).unlink(missing_ok=True)

    def died(self, inbox: str, called: str, is_engine: bool) -> Verdict:
        """A part has died, which had this inbox: who of those that it had in the works is to blame."""
        page = page_path(self._folder, inbox)
        if is_engine:
            return Verdict(*self._engines.died(running_at_death(page), called))
        suspicion = self._workers.setdefault(called, Suspicion())
        before = suspicion.suspects
        suspects, convicted = suspicion.died([one.id for one in work_at_death(page)], called)
        # Those whose turn to be tried had not come stay under suspicion.
        return Verdict([*suspects, *sorted(before.difference(suspects, convicted))], convicted)

    def work_of(self, inbox: str) -> str:
        """What a text worker was at when it died, as a sentence goes on."""
        return sentence(work_at_death(page_path(self._folder, inbox)))


def sentence(work: Iterable[Work]) -> str:
    """What follows "was killed": empty where it was at nothing."""
    named = " and ".join(f"{one.did} request {one.id}" for one in work)
    return f" while it {named}" if named else ""
