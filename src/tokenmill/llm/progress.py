"""Show the progress bar of `LLM`: prompts that are done, tokens, tokens a second."""

from __future__ import annotations

from typing import Self


class ProgressBar:
    """A progress bar as a context manager; rich is imported when it is made, shown or not."""

    def __init__(self, total: int, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._num_tokens = 0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[tokens]} tokens, {task.fields[rate]:.1f}/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._task = self._progress.add_task("generating", total=total, tokens=0, rate=0.0)

    def update(self, num_finished: int, num_new_tokens: int) -> None:
        """Show the progress after a step."""
        self._num_tokens += num_new_tokens
        elapsed = self._progress.tasks[0].elapsed or 0.0
        rate = self._num_tokens / elapsed if elapsed else 0.0
        self._progress.update(self._task, completed=num_finished, tokens=self._num_tokens, rate=rate)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
