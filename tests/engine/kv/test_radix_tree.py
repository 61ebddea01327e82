"""The radix tree against a dictionary of prefixes, and its order of eviction by name."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiers import scaled
from tokenmill.core.request import CacheKey
from tokenmill.engine.kv.radix_node import RadixNode
from tokenmill.engine.kv.radix_tree import RadixTree

Prefix = tuple[str, tuple[int, ...]]


def least_recently_used(tree: RadixTree, count: int) -> list[int]:
    """The pages that should go, by plain search: the tail of the free leaf used longest ago, again and again."""
    left = {node: node.pages.tolist() for node in tree.nodes()}
    going: list[int] = []
    while len(going) < count:
        parents = {node.parent for node, pages in left.items() if pages}
        leaves = [node for node, pages in left.items() if pages and not node.locks and node not in parents]
        going.append(left[min(leaves, key=lambda node: (node.last_used, node.serial))].pop())
    return going


class Oracle:
    """A tree driven like the KV manager drives it, beside a flat dictionary {prefix of whole pages: page}."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.tree = RadixTree(page_size)
        self.pages: dict[Prefix, int] = {}
        self.held: list[tuple[str, list[int], RadixNode]] = []
        self.next_page = 1
        self.step = 0

    def insert(self, salt: str, tokens: list[int]) -> None:
        """Match, lock, hand over the pages that were not there, and keep the lock."""
        self.step += 1
        match = self.tree.match(CacheKey(salt=salt), self.whole_pages(tokens), self.step)
        assert match.pages.tolist() == self.expected_match(salt, tokens), "a wrong match"
        self.tree.lock(match.node)
        self.held.append((salt, tokens, self.extend(salt, tokens, match.node, match.num_tokens)))

    def grow(self, index: int, more: list[int]) -> None:
        """One of the holders goes on, as a decoding request does, whatever others inserted meanwhile."""
        if self.held:
            self.step += 1
            salt, tokens, node = self.held.pop(index % len(self.held))
            grown = tokens + more
            self.held.append((salt, grown, self.extend(salt, grown, node, len(self.whole_pages(tokens)))))

    def whole_pages(self, tokens: list[int]) -> np.ndarray:
        return np.array(tokens[: len(tokens) // self.page_size * self.page_size], dtype=np.int32)

    def extend(self, salt: str, tokens: list[int], node: RadixNode, done: int) -> RadixNode:
        array = self.whole_pages(tokens)
        ends = range(done + self.page_size, len(array) + 1, self.page_size)
        if not ends:
            return node
        fresh = np.arange(self.next_page, self.next_page + len(ends), dtype=np.int32)
        self.next_page += len(ends)
        new_node, refused = self.tree.extend(node, array[done:], fresh)
        prefixes = [(salt, tuple(tokens[:end])) for end in ends]
        expected_refused = [page for page, prefix in zip(fresh.tolist(), prefixes, strict=True) if prefix in self.pages]
        assert refused.tolist() == expected_refused, "took a duplicate, or refused what was new"
        for page, prefix in zip(fresh.tolist(), prefixes, strict=True):
            self.pages.setdefault(prefix, page)
        self.tree.lock(new_node)
        self.tree.unlock(node, self.step)
        return new_node

    def release(self, index: int) -> None:
        if self.held:
            self.step += 1
            _, _, node = self.held.pop(index % len(self.held))
            self.tree.unlock(node, self.step)

    def evict(self, count: int) -> None:
        count = min(count, self.tree.num_evictable)
        expected = least_recently_used(self.tree, count)
        evicted = self.tree.evict(count)
        assert evicted == expected, "not the least recently used, or in another order"
        gone = {prefix for prefix, page in self.pages.items() if page in evicted}
        assert len(gone) == count, "a page was evicted that the cache does not have"
        self.pages = {prefix: page for prefix, page in self.pages.items() if prefix not in gone}
        for salt, tokens in self.pages:
            for end in range(self.page_size, len(tokens), self.page_size):
                assert (salt, tokens[:end]) in self.pages, "a page was evicted before those that follow it"
        for salt, tokens, _ in self.held:
            usable = len(tokens) // self.page_size * self.page_size
            assert not usable or (salt, tuple(tokens[:usable])) in self.pages, "a locked page was evicted"

    def expected_match(self, salt: str, tokens: list[int]) -> list[int]:
        found = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self.pages.get((salt, tuple(tokens[:end])))
            if page is None:
                break
            found.append(page)
        return found

    def check(self) -> None:
        self.tree.check_invariants()
        assert self.tree.num_pinned + self.tree.num_evictable == len(self.pages), "page counts are off"


operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.sampled_from(["", "a"]), st.lists(st.integers(0, 1), min_size=1, max_size=20)),
        st.tuples(st.just("grow"), st.integers(0, 10), st.lists(st.integers(0, 1), min_size=1, max_size=6)),
        st.tuples(st.just("release"), st.integers(0, 10)),
        st.tuples(st.just("evict"), st.integers(1, 12)),
    ),
    max_size=40,
)


@given(page_size=st.sampled_from([1, 2, 4]), operations=operations)
@settings(max_examples=scaled(80), deadline=None)
def test_matches_inserts_and_evicts_like_a_dictionary_of_prefixes(page_size: int, operations: list[tuple]) -> None:
    oracle = Oracle(page_size)
    for name, *arguments in operations:
        getattr(oracle, name)(*arguments)
        oracle.check()
    while oracle.held:
        oracle.release(0)
    oracle.evict(len(oracle.pages))
    oracle.check()
    assert oracle.pages == {}
    assert oracle.tree.nodes() == []


def cached(oracle: Oracle, tokens: list[int]) -> int:
    return len(oracle.expected_match("", tokens))


def test_the_least_recently_used_leaf_goes_first_and_its_tail_before_its_head() -> None:
    oracle = Oracle(page_size=2)
    old, new = [1, 1, 2, 2, 3, 3], [5, 5, 6, 6]
    for tokens in (old, new):
        oracle.insert("", tokens)
        oracle.release(0)
    oracle.evict(1)
    assert (cached(oracle, old), cached(oracle, new)) == (2, 2)
    oracle.evict(2)
    assert (cached(oracle, old), cached(oracle, new)) == (0, 2)


def test_a_match_makes_a_prefix_recent_again() -> None:
    oracle = Oracle(page_size=2)
    first, second = [1, 1, 2, 2], [5, 5, 6, 6]
    for tokens in (first, second, first):
        oracle.insert("", tokens)
        oracle.release(0)
    oracle.evict(2)
    assert (cached(oracle, first), cached(oracle, second)) == (2, 0)


def test_a_look_counts_as_a_use() -> None:
    oracle = Oracle(page_size=2)
    first, second = [1, 1, 2, 2], [5, 5, 6, 6]
    for tokens in (first, second):
        oracle.insert("", tokens)
        oracle.release(0)
    oracle.tree.match(CacheKey(), np.array(first, dtype=np.int32), oracle.step + 1)
    oracle.evict(2)
    assert (cached(oracle, first), cached(oracle, second)) == (2, 0)
    oracle.evict(2)
    assert oracle.pages == {}, "what was looked at can still be evicted"


def test_a_release_counts_as_a_use() -> None:
    oracle = Oracle(page_size=2)
    first, second = [1, 1, 2, 2], [5, 5, 6, 6]
    oracle.insert("", first)
    oracle.insert("", second)
    oracle.release(1)
    oracle.release(0)
    oracle.evict(2)
    assert (cached(oracle, first), cached(oracle, second)) == (2, 0)


def test_a_parent_is_evictable_once_its_last_child_is_gone() -> None:
    oracle = Oracle(page_size=1)
    for tokens in ([1, 2, 3], [1, 2, 4]):
        oracle.insert("", tokens)
        oracle.release(0)
    oracle.evict(4)
    assert oracle.pages == {}


def test_a_decoding_request_lengthens_one_node_instead_of_adding_one_per_page() -> None:
    tree = RadixTree(page_size=1)
    node = tree.match(CacheKey(), np.empty(0, dtype=np.int32), 0).node
    tree.lock(node)
    for step in range(100):
        token = np.array([step], dtype=np.int32)
        grown, _ = tree.extend(node, token, token + 1)
        tree.lock(grown)
        tree.unlock(node, step)
        node = grown
    assert len(tree.nodes()) == 1
    tree.check_invariants()


def test_a_look_at_an_unknown_salt_leaves_no_trace() -> None:
    tree = RadixTree(page_size=1)
    for number in range(10):
        tree.match(CacheKey(salt=f"salt {number}"), np.array([1, 2], dtype=np.int32), 0)
    assert not tree._roots


def test_of_leaves_used_in_the_same_step_the_older_one_goes_first() -> None:
    oracle = Oracle(page_size=1)
    for tokens in ([3], [1], [2]):
        oracle.insert("", tokens)
    for _ in range(3):
        oracle.release(0)
        oracle.step -= 1
    assert oracle.tree.evict(3) == [1, 2, 3]


def test_the_lru_heap_stays_bounded_when_one_prefix_is_used_again_and_again() -> None:
    oracle = Oracle(page_size=1)
    for _ in range(50):
        oracle.insert("", [1, 2, 3])
        oracle.release(0)
        assert len(oracle.tree._queue) <= 2, "twice the nodes that could be evicted"


def test_a_node_that_another_holder_ends_at_is_not_lengthened() -> None:
    oracle = Oracle(page_size=1)
    oracle.insert("", [1])
    oracle.insert("", [1, 2])
    oracle.grow(0, [2, 3])  # passes the end of the second holder, whose leaf only that one has locked
    oracle.grow(0, [4])
    oracle.insert("", [1, 2, 4])
    oracle.insert("", [1, 2, 3, 4])
    oracle.check()


def test_a_salt_is_forgotten_with_its_last_page_and_its_last_user() -> None:
    oracle = Oracle(page_size=1)
    for number in range(5):
        oracle.insert(f"salt {number}", [1, 2])
        oracle.release(0)
    oracle.insert("used", [])
    assert len(oracle.tree._roots) == 6
    oracle.evict(9)
    assert len(oracle.tree._roots) == 2, "one has a page left, one has a user"
    oracle.evict(1)
    oracle.release(0)
    assert not oracle.tree._roots


def test_what_locks_pin_alone_is_what_comes_free_without_them(rng: np.random.Generator) -> None:
    tree = RadixTree(page_size=1)
    locked = []
    for page in range(1, 400, 8):
        tokens = rng.integers(0, 2, 8).astype(np.int32)
        node = tree.match(CacheKey(), tokens, 0).node
        tree.lock(node)
        start = len(node.path_pages())
        deepest, _ = tree.extend(node, tokens[start:], np.arange(page, page + 8 - start, dtype=np.int32))
        tree.lock(deepest)
        tree.unlock(node, 0)
        locked += [deepest] * int(rng.integers(1, 3))
        if len(locked) > 1 and locked[-1] is locked[-2]:
            tree.lock(deepest)
    for count in rng.integers(1, 12, 20):
        chosen = [locked[index] for index in rng.permutation(len(locked))[:count]]
        before, expected = tree.num_evictable, tree.num_unlocked_by(chosen)
        for node in chosen:
            tree.unlock(node, 0)
        assert tree.num_evictable - before == expected
        for node in chosen:
            tree.lock(node)
    tree.check_invariants()
