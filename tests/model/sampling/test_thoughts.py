"""A budget of thinking: which token must come, as a function of the tokens that came."""

import random
from itertools import pairwise

import pytest

from tokenmill.core.sampling_params import ThinkingBudget
from tokenmill.model.sampling.thoughts import Thoughts

BEGIN, END, MESSAGE = (91, 92), (81, 82), (71, 72, 73)


@pytest.fixture
def rng():
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    return random.Random(seed)


def budget(most, has_begun=True, message=MESSAGE, begin=BEGIN, end=END):
    return ThinkingBudget(most, begin, end, message + end, has_begun)


def played(given, thoughts):
    """The output where a model would write `given`, and all that is forced is."""
    output, wanted = [], list(given)
    while wanted:
        token = thoughts.forced[0] if thoughts.forced else wanted.pop(0)
        assert not thoughts.refuses(token)
        thoughts.add_token(token)
        output.append(token)
    return output


def test_the_budget_counts_tokens_and_ends_with_message_and_mark():
    assert played(range(6), Thoughts(budget(4))) == [0, 1, 2, 3, *MESSAGE, *END, 4, 5]
    assert played(range(2), Thoughts(budget(0))) == [*MESSAGE, *END, 0, 1]
    assert played(range(3), Thoughts(budget(2, message=()))) == [0, 1, *END, 2]


def test_thinking_that_ends_by_itself_is_left_alone():
    own = [0, 1, *END, *range(9)]
    thoughts = Thoughts(budget(4))
    assert played(own, thoughts) == own
    assert thoughts.num_tokens == 2


def test_only_thinking_counts_and_later_thinking_counts_on():
    thoughts = Thoughts(budget(4, has_begun=False))
    given = [*range(9), *BEGIN, 1, 2, *END, *range(9), *BEGIN, 5, 6, 7]
    assert played(given, thoughts) == [*given[:-1], *MESSAGE, *END, 7]
    assert played([*BEGIN, 7], thoughts) == [*BEGIN, *MESSAGE, *END, 7], "nothing is left of it"


def test_an_answer_may_repeat_the_mark_of_its_prompt():
    assert played([*BEGIN, *range(4)], Thoughts(budget(2))) == [*BEGIN, 0, 1, *MESSAGE, *END, 2, 3]


@pytest.mark.parametrize("has_begun", [False, True])
def test_the_state_follows_from_the_output_alone(rng, has_begun):
    for _ in range(300):
        marks = {"begin": BEGIN[: rng.randint(1, 2)], "end": END[: rng.randint(1, 2)]}
        own = budget(rng.randrange(8), has_begun, MESSAGE[: rng.randrange(4)], **marks)
        given = rng.choices([1, 2, *BEGIN, *END, *MESSAGE], k=rng.randint(1, 40))
        output = played(given, Thoughts(own))
        states = [Thoughts(own, output[:cut]) for cut in range(len(output) + 1)]
        for (state, following), token in zip(pairwise(states), output, strict=True):
            assert not state.refuses(token), "a resumed request goes on within what is forced"
            assert (state.after([token]).forced, state.after([token]).num_tokens) == (
                following.forced,
                following.num_tokens,
            )
        drafts = rng.choices([1, 2, *BEGIN, *END, *MESSAGE], k=6)
        whole = states[-1].after(drafts)
        assert whole.forced == Thoughts(own, [*output, *drafts]).forced
        assert states[-1].forced == Thoughts(own, output).forced, "drafts leave it as it is"


def test_a_budget_that_is_cut_later_ends_thinking_at_once():
    thoughts = Thoughts(budget(0), [1, 2, MESSAGE[0], 3, 4])
    assert tuple(thoughts.forced) == (*MESSAGE, *END)
    thoughts.add_token(MESSAGE[0])
    assert tuple(Thoughts(budget(0), [1, 2, 3, 4, MESSAGE[0]]).forced) == tuple(thoughts.forced) == (*MESSAGE[1:], *END)
