"""Lives of KV pages, on a clock of the test's own."""

from __future__ import annotations

from tokenmill.core.histogram import Histogram
from tokenmill.core.request import Request
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.engine.kv.kv_manager import KVManager
from tokenmill.engine.kv.page_pool import PagePool
from tokenmill.engine.kv.radix_tree import RadixTree
from tokenmill.startup.assembly.kv_metrics import PageLives


class Watched:
    """A manager of pages of one token, whose lives are watched: one page in `sample`."""

    def __init__(self, num_pages: int, sample: int) -> None:
        self.now = 100.0
        self.kv = KVManager(PagePool(num_pages + 1), RadixTree(1), 1)
        self.lives = PageLives(sample, lambda: self.now)
        self.lives.watch(self.kv)

    def run(self, tokens: list[int], step: int) -> None:
        """Run a request over all pages of a prompt and one more token, which it computes at once."""
        request = Request(str(step), [*tokens, 0], SamplingParams(), arrival=0, max_tokens_total=len(tokens) + 2)
        match = self.kv.match(request, step)
        assert self.kv.acquire(request, match, len(tokens), step, 0)
        self.kv.count_match(request, match)
        self.kv.cache_full_pages(request, len(tokens), step)
        self.kv.release(request, step)


def numbers_of(values: Histogram) -> tuple[int, float]:
    return sum(values.counts), values.total


def test_a_page_is_stored_used_again_and_evicted() -> None:
    watched = Watched(6, sample=1)
    watched.run([1, 2, 3], step=1)
    watched.now += 10
    watched.run([1, 2, 3], step=2)
    watched.now += 5
    watched.run([1, 2, 9], step=3)
    watched.now += 2
    assert numbers_of(watched.lives.reuse_gap) == (5, 3 * 10 + 2 * 5)
    assert numbers_of(watched.lives.lifetime) == (0, 0)
    watched.run([4, 5, 6, 7, 8], step=4)  # of the four cached pages, three must go
    assert numbers_of(watched.lives.lifetime)[0] == 3
    fields = watched.lives.counts()
    assert fields["kv_idle"].total == 7 + 2 + 2, "the page of 3 since step 2, then tails of the others"
    assert fields["kv_lifetime"].total == 17 + 2 + 17


def test_only_a_sample_is_watched() -> None:
    watched = Watched(64, sample=8)
    for step in range(1, 30):
        watched.run([step * 100 + i for i in range(20)], step)
    counted = sum(watched.lives.lifetime.counts)
    assert 0 < counted <= 29 * 20 / 8 + 8


def test_a_reset_ends_all_lives() -> None:
    watched = Watched(8, sample=1)
    watched.run([1, 2, 3], step=1)
    assert watched.kv.clear_cache()
    assert numbers_of(watched.lives.lifetime)[0] == 3
    assert not watched.lives._lives


def test_watching_changes_nothing_of_what_the_cache_does() -> None:
    watched = Watched(6, sample=1)
    assert not watched.kv.on_replaced, "with a listener it would give pages for copies"
