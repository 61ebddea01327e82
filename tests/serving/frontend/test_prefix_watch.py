"""A short change that costs a conversation its cached prefix is found, shown and logged once."""

import logging
import random

import numpy as np
import pytest

from tests.serving.frontend.tokenizers_for_tests import byte_level_tokenizer, wrapped
from tokenmill.serving.frontend import prefix_watch
from tokenmill.serving.frontend.prefix_watch import LEAST_EQUAL, MOST_CHANGED, PrefixWatch


@pytest.fixture
def watch():
    return PrefixWatch(wrapped(byte_level_tokenizer()))


@pytest.fixture
def rng():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def ids(rng, count, low=0, high=250):
    return [rng.randrange(low, high) for _ in range(count)]


def test_a_prompt_that_goes_on_with_the_last_is_no_change(watch, rng):
    prompt = ids(rng, 400)
    assert watch.add("a", prompt) is None
    assert watch.add("a", [*prompt[:-4], *ids(rng, 200)]) is None, "the end that invites the answer may differ"
    assert watch.add("a", prompt) is None


def test_a_short_change_is_found_wherever_it_is(watch, rng):
    for _ in range(200):
        head, rest = ids(rng, rng.randrange(60)), ids(rng, LEAST_EQUAL + 32 + rng.randrange(400))
        was, now = (ids(rng, rng.randrange(1, MOST_CHANGED - 4), low=low, high=low + 20) for low in (0, 20))
        name = str(rng.random())
        assert watch.add(name, head + was + [252] + rest) is None
        change = watch.add(name, head + now + [252] + rest + ids(rng, 20))
        assert (change.position, change.num_equal) == (len(head), len(rest) + 1)
        assert watch.add(name, head + now + [252] + rest + ids(rng, 90)) is None


def test_spans_that_are_left_out_or_put_in_are_changes_too(watch, rng):
    head, more, rest = ids(rng, 20), ids(rng, 40), ids(rng, 300)
    watch.add("a", head + rest)
    assert watch.add("a", head + more + rest).num_equal >= len(rest)
    assert watch.add("a", head + rest).num_equal >= len(rest)


def test_other_conversations_and_short_rests_are_no_change(watch, rng):
    head, rest = ids(rng, 100), ids(rng, 300)
    watch.add("a", [*head, 251, *rest])
    assert watch.add("b", [*head, 252, *rest]) is None, "one name's prompts are not compared with another's"
    assert watch.add("a", [*head, 252, *ids(rng, 300)]) is None
    assert watch.add("a", [*head, *ids(rng, 2 * MOST_CHANGED, high=99), *rest]) is None
    assert watch.add("a", [*head, 252]) is None


def test_agents_that_take_turns_are_kept_apart(watch, rng):
    prompts = [ids(rng, 300) for _ in range(4)]
    for turn in range(5):
        for i, prompt in enumerate(prompts):
            change = watch.add("a", [turn, *prompt]) if i == 3 else watch.add("a", prompt)
            assert (change is None) == (i != 3 or turn == 0)
            prompt.extend(ids(rng, 50))


def test_memory_is_bounded(watch, rng, monkeypatch):
    monkeypatch.setattr(prefix_watch, "_MOST_TOKENS", 5000)
    for i in range(100):
        watch.add(str(rng.randrange(20)), ids(rng, 300 + i))
        kept = [len(prompt) for own in watch._conversations.values() for prompt in own]
        assert sum(kept) == watch.num_tokens <= 5000
    for _ in range(100):
        watch.add("one", ids(rng, 200))
    assert len(watch._conversations["one"]) == 8


def test_what_changed_is_shown_and_logged_once_per_cause(watch, caplog):
    encode = byte_level_tokenizer().encode
    rest = " and so on".join(str(i) for i in range(200))
    changes = []
    with caplog.at_level(logging.WARNING):
        for i in range(4):
            header = f"system: x-anthropic-billing-header: cch={i * 1111:04x};"
            change = watch.add("a", encode(f"{header} {rest}").ids)
            changes += [] if change is None else [watch.confirm(change, 3)]
        assert watch.confirm(changes[0], changes[0].position + 1) is None, "another prompt had it in the cache"
    assert len(changes) == 3
    assert changes[-1].cause == "claude-billing-header"
    assert "cch=08ae;" in changes[-1].was
    assert "cch=0d05;" in changes[-1].now
    assert changes[-1].num_cached == 3
    assert len(changes[-1].was) <= 40 + 120 + 40
    assert len(caplog.records) == 1
    assert "'" in caplog.records[0].message


def test_a_window_is_found_at_whole_tokens_only():
    window = np.array([1, 1], np.int32)
    shifted = b"\0" + window.tobytes() + b"\0\0\0"
    assert prefix_watch._find(shifted, window) == -1
    assert prefix_watch._find(shifted + b"\0" * 4 + window.tobytes(), window) in (3, 4)
