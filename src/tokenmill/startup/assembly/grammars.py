"""Grammars: outputs that follow a schema, a regex or a grammar."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from tokenmill.ipc.sandbox import Limits
from tokenmill.model.sampling.grammar_rows import GrammarRows
from tokenmill.model.structured.cache import GrammarCache
from tokenmill.model.structured.compiler import GrammarTokenizer
from tokenmill.startup.assembly.capability import Assembly, Capability
from tokenmill.startup.assembly.drafting import speculation_of


class Grammars(Capability):
    """Requests wait at the cache until their grammar is compiled; rows draw under its masks."""

    def __init__(self, cache: GrammarCache) -> None:
        self._cache = cache

    @classmethod
    def install(cls, assembly: Assembly) -> Self:
        """Make the cache for this model's tokenizer; the compiler loads with the first grammar."""
        config, limits = assembly.config, assembly.limits
        options = config.structured_outputs()
        tokenizer = GrammarTokenizer(
            path=str(Path(config.tokenizer or assembly.model.folder) / "tokenizer.json"),
            vocab_size=limits.vocab_size,
            eos_token_ids=tuple(sorted(limits.eos_token_ids)),
            cache=str(config.vocabulary_folder or ""),
        )
        cache = GrammarCache(tokenizer, Limits(options.compile_seconds, options.compile_bytes), options.cache_bytes)
        on_host = not assembly.platform.is_accelerator
        proposes = speculation_of(config, assembly.platform) is not None
        assembly.new_grammar_rows = lambda: GrammarRows(cache.template, limits.vocab_size, on_host, proposes)
        return cls(cache)

    def gates(self) -> tuple[GrammarCache]:
        """Return the cache."""
        return (self._cache,)
