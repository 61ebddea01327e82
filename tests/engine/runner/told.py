"""Compare what clients get from a run without drafts and from one with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from tokenmill.core.messages import TokenOutput

Told = tuple[Any, list[float]]
# Without native kernels sums depend on the shape of a step: a draw whose number is as close to the border between two
# tokens as sums are exact falls otherwise: 3 of some 2,800 requests of 35 tokens in float32.
REQUESTS_PER_CLOSE_DRAW = 20


def told(outputs: list[TokenOutput]) -> Told:
    """All that a client is told, however it was cut: tokens and end, and the numbers of log probabilities."""
    end, logprobs = outputs[-1], [one for output in outputs for one in output.logprobs or []]
    of_prompt = [one for output in outputs for one in output.prompt_logprobs or []]
    token_ids = [token for output in outputs for token in output.token_ids]
    return (token_ids, len(logprobs), end.finish_reason, end.error, end.error_status), [*_flat([logprobs, of_prompt])]


def assert_same(plain: Sequence[Told], drafted: Sequence[Told], is_exact: bool) -> int:
    """Compare two runs of the same requests; how many differ as rounding may have it.

    Args:
        is_exact: bit for bit. Else log probabilities are within a thousandth, and a request in twenty may differ.

    Raises:
        AssertionError: more differs than that.
    """
    assert len(plain) == len(drafted)
    num_close = 0
    for number, (want, got) in enumerate(zip(plain, drafted, strict=True)):
        if _is_same(want, got, is_exact):
            continue
        num_close += 1
        most = 0 if is_exact else 1 + len(plain) // REQUESTS_PER_CLOSE_DRAW
        assert num_close <= most, f"request {number}: {got} instead of {want}"
    return num_close


def _is_same(want: Told, got: Told, is_exact: bool) -> bool:
    if is_exact or want[0] != got[0]:
        return want == got
    # Ranks and ids of tokens that are as likely as others change places.
    numbers, others = ([one for one in told[1] if isinstance(one, float)] for told in (want, got))
    return len(numbers) == len(others) and np.allclose(numbers, others, rtol=0, atol=1e-3)


def _flat(value: Any) -> Iterator[float]:
    """The numbers of log probabilities, however deep."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.astuple(value)
    if isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)
    else:
        yield value
