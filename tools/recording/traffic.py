"""Traffic through an `LLM`, step by step, and what it brought in exact plain data.

Only public calls, and one reach: `LLM` has no argument for cache salt and tenant, which the HTTP
server sets, so they are added to the message that its module makes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
from tools.recording import wishes

from tokenmill import LLM, SamplingParams

# A drained scenario takes some hundred steps.
MOST_STEPS = 50_000


class Traffic:
    """Requests, sessions, vectors and aborts that arrive between steps.

    Attributes:
        lines: for each request its wishes and its outcome, in the order of arrival, after `run`.
    """

    def __init__(self, llm: LLM, rng: Random, grammars: bool) -> None:
        self._llm = llm
        self._rng = rng
        self._grammars = grammars
        # The deltas of a stream's own steps are not seen here, and a vector comes in one: it is one or the other.
        self._has_vectors = rng.random() < 0.5
        self._prefixes = [wishes.token_ids(rng, 60) for _ in range(3)]
        self._lines: list[dict[str, Any]] = []
        self._open: list[tuple[dict[str, Any], Any]] = []
        self._vectors: dict[str, bytes] = {}
        self._sessions: list[Any] = []
        self._streams: list[tuple[dict[str, Any], Iterator[Any], int]] = []

    def run(self, num_requests: int) -> list[dict[str, Any]]:
        """Let requests arrive in bursts, run until all have ended; returns one line for each."""
        if self._grammars:
            self._compile_grammars()
        while len(self._lines) < num_requests:
            for _ in range(self._rng.choice((0, 1, 1, 2, 5))):
                self._arrive()
            for _ in range(self._rng.choice((1, 1, 3, 6))):
                self._step()
        while self._streams or not all(_is_finished(output) for _, output in self._open):
            self._step()
        for session in self._sessions:
            session.close()
        for line, output in self._open:
            line.update(_outcome(output, with_logprobs=not self._grammars))
            vectors = [
                self._vectors[name].hex() for name in getattr(output, "request_ids", ()) if name in self._vectors
            ]
            if vectors:
                line["vectors"] = vectors
        return self._lines

    def _compile_grammars(self) -> None:
        """Each alone: what comes later finds them compiled, whatever that takes."""
        for grammar in wishes.GRAMMARS:
            params = _params({"max_tokens": 40, "temperature": 0.0, "structured_outputs": grammar})
            self._llm.generate([[1, 2, 3]], params, False)

    def _arrive(self) -> None:
        kind = self._rng.random()
        try:
            if kind < 0.15 and not self._grammars:
                self._turn()
            elif kind < 0.25 and not self._has_vectors and not self._grammars:
                self._stream()
            else:
                self._request()
        except Exception as error:
            if type(error).__name__ != "InvalidRequest":
                raise
            self._lines[-1]["refused"] = str(error)

    def _request(self) -> None:
        rng = self._rng
        fields: dict[str, Any] = {"priority": rng.choice((0, 0, -1, 1, 5)), "tenant": rng.choice("ab")}
        if rng.random() < 0.1:
            fields["cache_salt"] = rng.choice(("salt", "pepper"))
        wanted = wishes.sampling(rng, grammar=self._grammars and rng.random() < 0.7)
        prompt = wishes.prompt(rng, self._prefixes)
        if self._has_vectors and rng.random() < 0.15:
            fields["pooling"], wanted = rng.choice(("mean", "last")), {"max_tokens": 1, "temperature": 0.0}
        if rng.random() < 0.01:
            prompt = [1] * 1000  # refused: longer than any context
        line = self._begin("request", wanted, prompt, fields)
        # A vector is asked for by an argument; such a message has none of the other fields.
        pooling = {name: fields[name] for name in ("pooling",) if name in fields}
        with _MessageFields(self._llm, {} if pooling else fields):
            self._open.append((line, self._llm.submit(prompt, _params(wanted), **pooling)))

    def _turn(self) -> None:
        """A turn of a new session or of one that is open, whose last turn may still run; or the end of one."""
        rng = self._rng
        if self._sessions and rng.random() < 0.2:
            self._begin("end of a session", {}, "")
            self._sessions.pop(rng.randrange(len(self._sessions))).close()
            return
        if len(self._sessions) < 2:
            self._sessions.append(self._llm.session())
        wanted = wishes.sampling(rng, in_session=True)
        number = rng.randrange(len(self._sessions))
        prompt = wishes.token_ids(rng, 15)
        line = self._begin("turn", wanted, prompt, {"session": number})
        try:
            self._open.append((line, self._sessions[number].submit(prompt, _params(wanted))))
        except Exception:
            self._sessions.pop(number).close()
            raise

    def _stream(self) -> None:
        """A stream that is left after some deltas."""
        wanted = wishes.sampling(self._rng) | {"n": 1}
        prompt = wishes.prompt(self._rng, self._prefixes)
        line = self._begin("stream", wanted, prompt, {"deltas": []})
        self._streams.append((line, iter(self._llm.stream(prompt, _params(wanted))), self._rng.randint(1, 12)))

    def _begin(
        self, kind: str, wanted: dict[str, Any], prompt: Any, fields: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        line = {"request": len(self._lines), "kind": kind, "wanted": wanted, "prompt": prompt, **(fields or {})}
        self._lines.append(line)
        return line

    def _step(self) -> None:
        """One step, or as many as bring the oldest stream its next delta."""
        if self._streams:
            line, deltas, limit = self._streams[0]
            delta = next(deltas, None)
            if delta is not None:
                line["deltas"].append([delta.text, delta.token_ids, delta.finish_reason])
            if delta is None or len(line["deltas"]) == limit:
                deltas.close()
                self._streams.pop(0)
            return
        for delta in self._llm.step():
            if delta.embedding is not None:
                self._vectors[delta.id] = delta.embedding


class _MessageFields:
    """While it is entered, messages that `LLM.submit` makes have these fields."""

    def __init__(self, llm: LLM, fields: dict[str, Any]) -> None:
        # Code before "vLLM's shapes" made them where `LLM` is.
        self._module: Any = sys.modules.get("tokenmill.llm.arguments") or sys.modules[type(llm).__module__]
        self._fields = fields

    def __enter__(self) -> None:
        self._message = self._module.GenerateText
        self._module.GenerateText = functools.partial(self._message, **self._fields)

    def __exit__(self, *_: object) -> None:
        self._module.GenerateText = self._message


def _params(wanted: dict[str, Any]) -> SamplingParams:
    return msgspec.convert(wanted, SamplingParams)


def _is_finished(output: Any) -> bool:
    outputs = output.outputs if hasattr(output, "outputs") else [output]
    return all(each.finish_reason is not None for each in outputs)


def _outcome(output: Any, with_logprobs: bool) -> dict[str, Any]:
    if not hasattr(output, "outputs"):
        return {"outputs": [_continuation(output, with_logprobs)]}
    outcome = {
        "prompt_token_ids": output.prompt_token_ids,
        "outputs": [_continuation(each, with_logprobs) for each in output.outputs],
    }
    if with_logprobs:
        outcome |= {"cached": output.num_cached_tokens, "prompt_logprobs": _logprobs(output.prompt_logprobs)}
    return outcome


def _continuation(output: Any, with_logprobs: bool) -> dict[str, Any]:
    return {
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason and str(output.finish_reason),
        "stop_reason": output.stop_reason,
        "error": output.error,
        "logprobs": _logprobs(output.logprobs) if with_logprobs else None,
    }


def _logprobs(positions: Any) -> list[list[Any]] | None:
    """At each position (token id, exact logprob, rank) of the sampled token and then of the most likely ones."""
    if positions is None:
        return None
    return [
        [[token, float(one.logprob).hex(), one.rank] for token, one in _by_token(at).items()] for at in positions if at
    ]


def _by_token(position: Any) -> dict[int, Any]:
    """Code before "vLLM's shapes" gave the sampled token and a list."""
    if isinstance(position, dict):
        return position
    return {one.token_id: one for one in (position.sampled, *position.top)}
