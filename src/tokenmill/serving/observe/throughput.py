"""Write the line about throughput that an operator sees every few seconds while there is work."""

from __future__ import annotations

from tokenmill.core.engine_messages import EngineStats


class ThroughputLog:
    """Turns the engines' counters into rates."""

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._draft_tokens = 0
        self._accepted_tokens = 0

    def line(self, stats: EngineStats, seconds: float) -> str | None:
        """Return the line for the last `seconds`, from the counts of all engines; None if nothing happened."""
        # An engine that is started again counts from nothing again.
        prompt = max(0, stats.prompt_tokens - self._prompt_tokens)
        generation = max(0, stats.generation_tokens - self._generation_tokens)
        drafts = max(0, stats.num_draft_tokens - self._draft_tokens)
        accepted = max(0, stats.num_accepted_tokens - self._accepted_tokens)
        self._prompt_tokens, self._generation_tokens = stats.prompt_tokens, stats.generation_tokens
        self._draft_tokens, self._accepted_tokens = stats.num_draft_tokens, stats.num_accepted_tokens
        if not (prompt or generation):
            return None
        pinned = stats.num_pages_pinned / max(1, stats.num_pages)
        hits = stats.prefix_hits / max(1, stats.prefix_queries)
        right = f", drafts right {accepted / drafts:.1%} of {drafts / seconds:.1f} tok/s" if drafts else ""
        return (
            f"running {stats.num_running}, waiting {stats.num_waiting}, prompt {prompt / seconds:.1f} tok/s, "
            f"output {generation / seconds:.1f} tok/s, KV {pinned:.1%}, prefix cache hits {hits:.1%}{right}"
        )
