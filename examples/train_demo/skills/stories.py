"""Short stories with the characters and objects that the user names, from a compositional grammar.

A story is a beginning, a wish, a trouble, a turn, a rescue and an end; each part has several wordings with slots, so
that stories differ while every sentence is grammatical.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from .base import Sample, Split, assistant, casual, join_words, split_of, user
from .vocabulary import BEINGS, THINGS, invented_noun
from .words import ANIMALS, COLOURS, NAMES, NOUNS, article, person

PLACES = (
    "a small village",
    "a quiet valley",
    "a house by the river",
    "a town on a hill",
    "a wide green field",
    "a cottage near the woods",
    "a busy harbour",
    "an old mill",
)
TIMES = (
    "One morning",
    "One evening",
    "On a rainy day",
    "One sunny day",
    "Late one night",
    "On a cold winter day",
    "Early one spring",
)
BEGIN = (
    "Once there lived {who} in {place}.",
    "There was once {who} who lived in {place}.",
    "In {place} there lived {who}.",
    "Long ago, {who} lived in {place}.",
)
WISH = (
    "More than anything, {name} loved {a_object}.",
    "{name} had {a_object} and carried it everywhere.",
    "{name} dreamed of finding {a_object}.",
    "Every day {name} looked after {a_object}.",
)
TROUBLE = (
    "{time}, the {object} was gone.",
    "{time}, the {object} broke in two.",
    "{time}, a strong wind took the {object} away.",
    "{time}, the {object} fell into the water.",
    "{time}, a sly {animal} ran off with the {object}.",
)
FEELING = (
    "{name} was very sad.",
    "{name} sat down and cried.",
    "{name} did not know what to do.",
    '"Oh no!" said {name}.',
    "{name} took a deep breath and did not give up.",
)
SEARCH = (
    "{name} looked under the bed, behind the door and in the garden.",
    "{name} walked along the path until the sun was low.",
    "{name} asked everyone in the market.",
    "{name} followed the small tracks in the mud.",
)
MEET = (
    "Then {met} came by and offered to help.",
    "At the bridge {name} met {met}.",
    "Just then {met} called out from the other side of the road.",
    "Soon {met} heard about it and came at once.",
)
HELP = (
    '"Two can do more than one," said {friend}.',
    '"I know what to do," said {friend} with a smile.',
    '"Let us try together," said {friend}.',
    '"Do not worry," said {friend}.',
)
RESCUE = (
    "Together they worked until the {object} was safe again.",
    "They pulled with all their strength, and there was the {object}.",
    "After a long search they found the {object} in the tall grass.",
    "With a rope and some patience they brought the {object} back.",
    "Step by step they put everything right, and the {object} was as good as new.",
)
THANK = (
    "{name} thanked {friend} and shared some {colour} apples.",
    "{name} laughed and danced with {friend}.",
    "{name} gave {friend} a warm hug.",
    "That night they ate hot soup by the fire.",
)
END = (
    "From that day on, {name} and {friend} were the best of friends.",
    "And {name} never lost the {object} again.",
    "After that, {name} was never afraid to ask for help.",
    "And so the day ended well for everyone.",
)
ASKS = (
    "Tell me a short story about {list}.",
    "Tell me a story about {list}.",
    "Write a story about {list}.",
    "Write me a story about {list}.",
    "Write a short tale about {list}.",
    "A story about {list}, please.",
    "Can you write a story with {list}?",
    "Could you tell me a little story about {list}?",
    "Give me a short story with {list}.",
    "Let me hear a story about {list}.",
    "I want a story about {list}.",
    "Tell my child a story about {list}.",
    "story about {list}",
    "Write a short story with {list}.",
    "Tell a story about {list}.",
    "Make up a story with {list}.",
    "Can you tell me a story about {list}?",
    "I would like a story about {list}.",
    "Please write a little story about {list}.",
    "Story about {list}, please.",
)


OPEN_ASKS = (
    "Tell me a story.",
    "Tell me a short story.",
    "Write a story.",
    "Write a short story.",
    "Can you tell me a story?",
    "I would like to hear a story.",
    "Make up a story.",
    "A story, please.",
    "Tell me another story.",
    "Please tell me a bedtime story.",
)
FRIENDS = tuple(NAMES[:12])  # of those that nobody asked for; few, so that the likeliest one is a name


@dataclass(frozen=True)
class Cast:
    """Persons and things of a story; ``being`` is the hero's kind (None: any), ``friend`` a name or ``Pia the owl``."""

    name: str
    being: str | None
    friend: str
    item: str


def tell(rng: random.Random, cast: Cast) -> str:
    """A story of eight to eleven sentences."""
    name, friend, item = cast.name, cast.friend, cast.item
    kind = f"{rng.choice(('a young', 'a little'))} {cast.being} named {name}"
    if cast.being is None:
        kind = rng.choice(
            (
                f"a young {rng.choice(('baker', 'sailor', 'farmer', 'painter'))} named {name}",
                f"a girl named {name}",
                f"a boy named {name}",
                f"a little {rng.choice(ANIMALS)} named {name}",
            )
        )
    slots = {
        "name": name,
        "met": friend,
        "friend": friend.partition(" the ")[0],
        "object": item,
        "a_object": article(item),
        "who": kind,
        "place": rng.choice(PLACES),
        "time": rng.choice(TIMES),
        "animal": rng.choice(ANIMALS),
        "colour": rng.choice(COLOURS),
    }
    parts = [BEGIN, WISH, TROUBLE, FEELING, SEARCH, MEET, HELP, RESCUE, THANK, END]
    if rng.random() < 0.4:
        parts.remove(rng.choice((FEELING, SEARCH, HELP, THANK)))
    return " ".join(rng.choice(part).format(**slots) for part in parts)


def _pattern() -> re.Pattern[str]:
    """Every story that the grammar can tell: a name is any capitalized word, a thing any words in small letters."""
    parts = []
    for options in (BEGIN, WISH, TROUBLE, FEELING, SEARCH, MEET, HELP, RESCUE, THANK, END):
        alternatives = []
        for option in options:
            text = re.escape(option).replace(r"\{who\}", r"an? (?:[a-z]+ ){1,2}named \{name\}")
            text = text.replace(r"\{place\}", f"(?:{'|'.join(PLACES)})").replace(r"\{time\}", f"(?:{'|'.join(TIMES)})")
            text = text.replace(r"\{met\}", "[A-Z][a-z]+(?: the [a-z]+)?")
            text = re.sub(r"\\\{(name|friend)\\\}", "[A-Z][a-z]+", text)
            alternatives.append(re.sub(r"\\\{[a-z_]+\\\}", "[a-z ]+", text).replace(r"\{name\}", "[A-Z][a-z]+"))
        parts.append(f"(?:(?:{'|'.join(alternatives)}) )" + ("?" if options in (FEELING, SEARCH, HELP, THANK) else ""))
    return re.compile("".join(parts))


GRAMMAR = _pattern()


def is_grammatical(text: str) -> bool:
    """True if ``text`` is a whole story of the grammar, from its beginning to its end."""
    return GRAMMAR.fullmatch(f"{text.strip()} ") is not None


def _item(rng: random.Random) -> str:
    draw = rng.random()
    return invented_noun(rng) if draw < 0.08 else rng.choice(NOUNS if draw < 0.4 else THINGS)


def _cast(rng: random.Random) -> tuple[Cast, list[str]]:
    """A cast, and what of it the request names: persons by name or beings by kind, with or without an object."""
    beings = rng.sample(rng.choice((BEINGS, ANIMALS)), k=2)
    by_kind, both, thing = rng.random() < 0.5, rng.random() < 0.45, rng.random() < 0.85
    if by_kind:
        name, other = rng.sample(FRIENDS, k=2)
        cast = Cast(name, beings[0], f"{other} the {beings[1]}" if both else other, _item(rng))
        asked = [article(being) for being in beings[: 1 + both]]
    else:
        name = person(rng)
        other = person(rng) if both else rng.choice(FRIENDS)
        being = beings[0] if rng.random() < 0.25 else None
        cast = Cast(name, being, other, _item(rng))
        asked = [f"{name} the {being}" if being else name, *([other] if both else [])]
    return cast, [*asked, *([article(cast.item)] if thing else [])]


def _named(cast: Cast, listed: str) -> list[str]:
    """The words of a request that the story must have."""
    words = (cast.name, cast.being, cast.item, *cast.friend.split(" the "))
    return [word for word in words if word and re.search(rf"\b{word}\b", listed)]


def story(rng: random.Random, split: Split) -> Sample:
    """A request that names up to two characters and an object, and a story that has them."""
    while True:
        cast, asked = _cast(rng)
        key = f"story:{cast.name}:{cast.being}:{cast.friend}:{cast.item}"
        if cast.name != cast.friend and split_of(key) == split:
            break
    listed = join_words(asked)
    question = rng.choice(ASKS).format(list=listed)
    if rng.random() < 0.04:
        listed, question = "", rng.choice(OPEN_ASKS)
    messages = (user(casual(rng, question)), assistant(tell(rng, cast)))
    return Sample("stories", key, messages, exact=False, facts={"named": _named(cast, listed)})
