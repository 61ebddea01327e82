"""The index of what caches have, against a plain model of it: sets of prefixes."""

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.tiers import scaled
from tokenmill.core.messages import AddRequest
from tokenmill.core.page_names import first_name, page_names
from tokenmill.core.request import CacheKey
from tokenmill.core.sampling_params import SamplingParams
from tokenmill.serving.replicas.routing.prefix_index import PrefixIndex

SIZE = 4


def request(tokens, salt: str = "", outputs=()) -> AddRequest:
    params = SamplingParams()
    return AddRequest(
        id="a", prompt_token_ids=list(tokens), params=params, cache_salt=salt, output_token_ids=list(outputs)
    )


def test_names_go_on_from_any_page_and_depend_on_all_before_them():
    seed = random.randrange(2**32)
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2**31, 32 * 16, dtype=np.int32)
    before = first_name(CacheKey("model", "salt"))
    names = page_names(tokens, 16, before)
    cut = int(rng.integers(1, 32))
    assert page_names(tokens[cut * 16 :], 16, names[cut - 1]) == names[cut:], f"seed {seed}"
    changed = tokens.copy()
    changed[rng.integers(cut * 16)] ^= 1
    assert not set(page_names(changed, 16, before)[cut - 1 :]) & set(names), f"seed {seed}"
    swapped = tokens.reshape(32, 16)[::-1].reshape(-1)
    assert not set(page_names(swapped, 16, before)) & set(names), f"seed {seed}: the order of pages counts"


def test_names_are_the_same_in_every_process_and_version():
    names = page_names(np.arange(48, dtype=np.int32), 16, first_name(CacheKey("m", "s")))
    assert names == [9097503800768318681, 5268443149728718575, 6904783101171330071]


def test_a_request_with_another_salt_finds_nothing():
    index = PrefixIndex(SIZE, "model")
    tokens = range(20)
    index.change(0, [(True, index.names_of(request(tokens)))], is_first=True)
    assert index.num_cached_tokens(0, index.names_of(request(tokens))) == 20
    assert index.num_cached_tokens(0, index.names_of(request(tokens, salt="mine"))) == 0
    assert index.num_cached_tokens(0, PrefixIndex(SIZE, "other model").names_of(request(tokens))) == 0
    assert index.num_cached_tokens(1, index.names_of(request(tokens))) == 0


def test_what_a_request_has_brought_elsewhere_counts_as_its_prefix():
    index = PrefixIndex(SIZE, "")
    assert index.names_of(request(range(5), outputs=range(5, 12))) == index.names_of(request(range(12)))


def test_an_engine_that_caches_nothing_has_no_pages():
    index = PrefixIndex(0, "")
    assert index.names_of(request(range(20))) == []
    assert index.num_cached_tokens(0, []) == 0


class IndexBesideSets(RuleBasedStateMachine):
    """Engines store and evict paths of a small tree as a radix tree does; requests come and go."""

    engines = st.integers(0, 2)
    paths = st.lists(st.integers(0, 1), min_size=1, max_size=5)  # which of two pages comes next

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex(SIZE, "")
        self.held = {engine: set() for engine in range(3)}
        self.expected = {engine: [] for engine in range(3)}

    def names(self, path):
        return self.index.names_of(request([token for page in path for token in [page] * SIZE]))

    @rule(engine=engines, path=paths)
    def store(self, engine, path):
        new = [end for end in range(1, len(path) + 1) if tuple(path[:end]) not in self.held[engine]]
        names = self.names(path)
        self.index.change(engine, [(True, [names[end - 1] for end in new])], is_first=False)
        self.held[engine] |= {tuple(path[:end]) for end in new}

    @rule(engine=engines, data=st.data())
    def evict(self, engine, data):
        leaves = [one for one in self.held[engine] if not {(*one, 0), (*one, 1)} & self.held[engine]]
        if leaves:
            leaf = data.draw(st.sampled_from(sorted(leaves)))
            self.index.change(engine, [(False, [self.names(leaf)[-1]])], is_first=False)
            self.held[engine].remove(leaf)

    @rule(engine=engines, path=paths)
    def evict_and_store_in_one_report(self, engine, path):
        names = self.names(path)
        self.index.change(engine, [(True, names), (False, names[::-1]), (True, names)], is_first=False)
        self.held[engine] |= {tuple(path[:end]) for end in range(1, len(path) + 1)}

    @rule(engine=engines, path=paths)
    def begin_again(self, engine, path):
        self.index.change(engine, [(True, self.names(path))], is_first=True)
        self.held[engine] = {tuple(path[:end]) for end in range(1, len(path) + 1)}

    @rule(engine=engines, path=paths)
    def expect(self, engine, path):
        self.index.expect(engine, self.names(path))
        self.expected[engine].append(path)

    @rule(engine=engines, data=st.data())
    def expect_no_more(self, engine, data):
        if self.expected[engine]:
            path = self.expected[engine].pop(data.draw(st.integers(0, len(self.expected[engine]) - 1)))
            self.index.expect_no_more(engine, self.names(path))

    @rule(engine=engines)
    def die(self, engine):
        self.index.lose(engine)
        self.held[engine], self.expected[engine] = set(), []

    @invariant()
    def every_prompt_finds_what_is_there(self):
        for engine in range(3):
            there = self.held[engine] | {
                tuple(path[:end]) for path in self.expected[engine] for end in range(1, len(path) + 1)
            }
            for path in ([0, 0, 0, 0, 0], [0, 1, 0, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0]):
                found = 0
                while found < 5 and tuple(path[: found + 1]) in there:
                    found += 1
                assert self.index.num_cached_tokens(engine, self.names(path)) == found * SIZE

    @invariant()
    def nothing_is_kept_of_what_is_gone(self):
        for engine in range(3):
            assert len(self.index._held.get(engine, ())) == len(self.held[engine])
            assert self.expected[engine] or not self.index._expected.get(engine)


TestIndex = IndexBesideSets.TestCase
TestIndex.settings = settings(max_examples=scaled(30), stateful_step_count=30, deadline=None)
