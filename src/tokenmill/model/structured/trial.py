"""Compile grammars on trial, in forks of a sandbox that has the tokenizer: one that explodes takes only its fork along.

    python -m tokenmill.model.structured.trial LIMITS TOKENIZER

Time is the fork's own processor time: a busy machine fails no grammar.
"""

from __future__ import annotations

import sys

import msgspec

from tokenmill.core.errors import InvalidRequest
from tokenmill.ipc.sandbox import Limits, Outcome, Sandbox
from tokenmill.ipc.sandbox_process import own_memory, run_jobs
from tokenmill.model.structured.compiler import GrammarCompiler, GrammarTokenizer

_MODULE = "tokenmill.model.structured.trial"
_SMALL = '{"grammars": [{"lark_grammar": "start: /[a-z]*/"}]}'


class GrammarTrial:
    """Tries grammars, for any number of threads."""

    def __init__(self, tokenizer: GrammarTokenizer, limits: Limits) -> None:
        self._limits = limits
        self.sandbox = Sandbox(_MODULE, [msgspec.json.encode(tokenizer).decode()], limits)

    def check(self, text: str) -> int:
        """Return the bytes that the compiled grammar takes.

        Raises:
            InvalidRequest: it cannot be compiled within the limits.
            Unavailable: the trial failed for reasons that are not the grammar's.
        """
        outcome, data = self.sandbox.ask(text.encode())
        if outcome is Outcome.DONE:
            return int(data)
        if outcome is Outcome.REFUSED:
            raise InvalidRequest(data.decode())
        if outcome is Outcome.TOO_SLOW:
            raise InvalidRequest(f"the grammar takes more than {self._limits.cpu_seconds:g} seconds to compile")
        raise InvalidRequest(f"the grammar takes more than {self._limits.num_bytes >> 20} MiB of memory to compile")

    def close(self) -> None:
        """End the processes."""
        self.sandbox.close()


def main() -> int:
    """Run as the sandbox's process."""
    compiler = GrammarCompiler(msgspec.json.decode(sys.argv[2], type=GrammarTokenizer))

    def load() -> None:
        # What llguidance sets up with the first grammar is not the memory of those that follow.
        compiler.compile(_SMALL)

    def measure(data: bytes) -> bytes:
        before = own_memory()
        matcher = compiler.compile(data.decode())
        taken = max(own_memory() - before, 0)
        del matcher
        return str(taken).encode()

    run_jobs(measure, load, msgspec.json.decode(sys.argv[1], type=Limits))
    return 0


if __name__ == "__main__":
    sys.exit(main())
