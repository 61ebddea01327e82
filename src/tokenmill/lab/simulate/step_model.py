"""`StepModel`: predict the time of a step from its plan. Fitted to recorded steps; knows no architecture.

    seconds = fixed + rate(tokens) + requests + sampled + keys read by decodes + query-key pairs of prompts + new pages

with no coefficient below zero. `rate` is a line from knot to knot with a rate of its own on each stretch: so it can be
the roofline's maximum of bytes and operations (Williams et al. 2009), which is flat at `fixed`, the time to read the
weights, until operations count, and also any other line that does not fall. The terms of attention are those of Vidur
(Agrawal et al. 2024) in sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.core.plan import StepPlan
from tokenmill.engine.loop.step_log import StepRecord
from tokenmill.lab.simulate.nnls import Floats, nnls

VERSION = 1
KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# What is linear besides the tokens.
TERMS = ("requests", "sampled", "keys", "pairs", "pages")
# How far beyond what was recorded a step may be.
REACH = 1.5
# Least steps to fit to.
MIN_STEPS = 30
NUM_QUANTILES = 101


class StepSize(msgspec.Struct, frozen=True):
    """The quantities of a step that decide its time.

    Attributes:
        tokens: tokens that it runs.
        requests: requests in it.
        sampled: tokens that it may bring.
        keys: keys that rows of one token read, their own included.
        pairs: pairs of a query and a key that it reads, over the chunks of prompts.
        pages: new entries of the page table.
    """

    tokens: int
    requests: int
    sampled: int
    keys: int
    pairs: int
    pages: int

    @classmethod
    def from_plan(cls, plan: StepPlan) -> Self:
        """Return the size of a plan."""
        return cls._of(plan.num_computed, plan.num_scheduled, plan.num_samples, len(plan.page_ids))

    @classmethod
    def of_record(cls, plan: Mapping[str, Any]) -> Self:
        """Return the size of a recorded plan."""
        names = ("num_computed", "num_scheduled", "num_samples")
        computed, scheduled, samples = (np.array(plan[name], np.int32) for name in names)
        return cls._of(computed, scheduled, samples, len(plan["page_ids"]))

    @classmethod
    def _of(
        cls,
        computed: npt.NDArray[np.int32],
        scheduled: npt.NDArray[np.int32],
        samples: npt.NDArray[np.int32],
        pages: int,
    ) -> Self:
        lengths = scheduled.astype(np.int64)
        is_decode = lengths == 1
        # Query i of a chunk reads computed + i + 1 keys.
        pairs = lengths * computed + lengths * (lengths + 1) // 2
        keys = int(pairs[is_decode].sum())
        total = int(pairs.sum())
        return cls(int(lengths.sum()), len(lengths), int(samples.sum()), keys, total - keys, pages)


class StepModel(msgspec.Struct, kw_only=True):
    """Predicts the seconds of steps, as they were on one machine with one model and its flags.

    Attributes:
        rates: seconds of a token, on each stretch between `KNOTS` and beyond the last.
        fixed: seconds of any step.
        terms: seconds of one of each of `TERMS`.
        largest: the largest recorded value of each field of `StepSize`.
        ratios: quantiles, evenly spaced from 0 to 1, of recorded over predicted seconds, of steps that were held out.
        error: mean of |recorded / predicted - 1| over these steps.
        num_steps: number of recorded steps.
    """

    version: int = VERSION
    fixed: float
    rates: list[float]
    terms: list[float]
    largest: list[int]
    ratios: list[float]
    error: float
    num_steps: int

    def seconds(self, size: StepSize) -> float:
        """Return the seconds of a step, without chance."""
        tokens, total = size.tokens, self.fixed
        for place, rate in enumerate(self.rates):
            if tokens <= KNOTS[place]:
                break
            end = KNOTS[place + 1] if place + 1 < len(KNOTS) else tokens
            total += rate * (min(tokens, end) - KNOTS[place])
        requests, sampled, keys, pairs, pages = self.terms
        total += requests * size.requests + sampled * size.sampled + keys * size.keys
        return total + pairs * size.pairs + pages * size.pages

    def drawn_seconds(self, size: StepSize, key: int) -> float:
        """Return the seconds of a step, off by as much as a recorded one was; the same key draws the same."""
        place = _unit(key) * (NUM_QUANTILES - 1)
        low = int(place)
        ratio = self.ratios[low] + (self.ratios[low + 1] - self.ratios[low]) * (place - low)
        return self.seconds(size) * ratio

    def check_domain(self, size: StepSize) -> None:
        """Refuse a step too far beyond the recorded ones. New pages are not limited, since they are cheap.

        Raises:
            InvalidConfig: naming the quantity and its value.
        """
        for name, known in zip(StepSize.__struct_fields__, self.largest, strict=True):
            has = getattr(size, name)
            if name != "pages" and has > REACH * max(1, known):
                raise InvalidConfig(
                    f"a step has {has:,} {name}, the step model was fitted to at most {known:,}: fit it to a log with "
                    f"such steps, or let it guess with --beyond"
                )


def fit(steps: Sequence[tuple[StepSize, float]]) -> StepModel:
    """Fit a model to recorded steps and their seconds; a third of them, spread evenly, measures its error.

    The fit minimizes the sum of the squares of relative errors, so that short steps count.

    Raises:
        TokenMillError: there are too few steps.
    """
    steps = [(size, seconds) for size, seconds in steps if seconds > 0.0]
    if len(steps) < MIN_STEPS:
        raise TokenMillError(f"{len(steps)} steps are too few to fit a model to; {MIN_STEPS} are needed")
    sizes = [size for size, _ in steps]
    columns, seconds = _columns(sizes), np.array([spent for _, spent in steps])
    is_held_out = np.arange(len(steps)) % 3 == 2
    trial = _fitted(columns[~is_held_out], seconds[~is_held_out])
    ratios = seconds[is_held_out] / np.maximum(columns[is_held_out] @ trial, 1e-12)
    found = _fitted(columns, seconds).tolist()
    num_rates = len(KNOTS)
    return StepModel(
        fixed=found[0],
        rates=found[1 : 1 + num_rates],
        terms=found[1 + num_rates :],
        largest=[max(getattr(size, name) for size in sizes) for name in StepSize.__struct_fields__],
        ratios=np.quantile(ratios, np.linspace(0.0, 1.0, NUM_QUANTILES)).tolist(),
        error=float(np.abs(ratios - 1.0).mean()),
        num_steps=len(steps),
    )


def _columns(sizes: Sequence[StepSize]) -> Floats:
    """Return [steps, 1 + knots + terms]: ones, tokens on each stretch, and the terms."""
    tokens = np.array([size.tokens for size in sizes], np.float64)
    starts = np.array(KNOTS, np.float64)
    widths = np.append(np.diff(starts), np.inf)
    stretches = np.clip(tokens[:, None] - starts, 0.0, widths)
    terms = np.array([[getattr(size, name) for name in TERMS] for size in sizes], np.float64)
    return np.concatenate([np.ones((len(sizes), 1)), stretches, terms], axis=1)


def _fitted(columns: Floats, seconds: Floats) -> Floats:
    """Fit with errors relative to predicted times: relative to recorded times, the mean would come out too low."""
    found = nnls(columns / seconds[:, None], np.ones(len(seconds)))
    scale = np.maximum(columns @ found, 1e-9)
    return nnls(columns / scale[:, None], seconds / scale)


def recorded_steps(records: Iterable[StepRecord]) -> Iterator[tuple[StepSize, float]]:
    """Yield the recorded steps that came to an end, and the seconds of each.

    With overlap, a step lasts from the end of the one before it to its own end.
    """
    sizes: dict[int, StepSize] = {}
    spent = 0.0
    for record in records:
        if record.plan is not None and record.plan["request_ids"]:
            sizes[record.plan["step"]] = StepSize.of_record(record.plan)
        spent += record.all_seconds
        if record.committed is not None or record.error is not None:
            size = None if record.committed is None else sizes.pop(record.committed, None)
            if size is not None:
                yield size, spent
            spent = 0.0
        elif record.plan is None:
            spent = 0.0  # nothing ran


def read_step_model(path: Path) -> StepModel:
    """Read a model from a file that `tokenmill fit` or `tokenmill bench steps` wrote.

    Raises:
        TokenMillError: the file cannot be read, or is no step model.
    """
    try:
        model = msgspec.json.decode(path.read_bytes(), type=StepModel)
    except OSError as error:
        raise TokenMillError(f"cannot read {path}: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TokenMillError(f"{path} is not a step model: {error}") from error
    if model.version != VERSION:
        raise TokenMillError(f"{path} is a step model of version {model.version}; this is version {VERSION}")
    lengths = (len(model.rates), len(model.terms), len(model.largest), len(model.ratios))
    if lengths != (len(KNOTS), len(TERMS), len(StepSize.__struct_fields__), NUM_QUANTILES):
        raise TokenMillError(f"{path} is not a step model: it has {lengths} numbers")
    return model


def describe(model: StepModel) -> str:
    """Return lines on the fitted model: its error, its times and its domain."""
    one = model.seconds(StepSize(1, 1, 1, 1, 0, 0))
    low, high = model.ratios[1], model.ratios[-2]
    largest = ", ".join(
        f"{most:,} {name}" for name, most in zip(StepSize.__struct_fields__, model.largest, strict=True)
    )
    return "\n".join(
        [
            f"{model.num_steps:,} steps; off by {model.error:.1%} on average in a third that was held out, where a "
            f"step took {low:.2f} to {high:.2f} times as long as predicted (98% of them)",
            f"a step of one token takes {one * 1e3:.2f} ms, {model.fixed * 1e3:.2f} ms of it whatever it holds",
            f"knows steps of at most {largest}",
        ]
    )


def _unit(key: int) -> float:
    """Return a pseudo-random number in [0, 1): SplitMix64 (Steele, Lea and Flood 2014) of the key."""
    mask = (1 << 64) - 1
    mixed = (key * 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)
