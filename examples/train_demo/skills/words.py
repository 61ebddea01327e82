"""Word lists and made-up names that the other generators draw from. Invented or ordinary words only."""

from __future__ import annotations

import random


def _list(words: str) -> list[str]:
    return words.split()


NAMES = _list(
    "Mira Tobin Lena Orin Pia Jarek Selma Nils Tamsin Odo Ruta Bram Ilse Kato Wren Dorin Yara Fenn Anouk Piet "
    "Sanna Ravi Noor Emil Greta Hugo Ines Jonas Kira Luca Maya Nadia Oscar Petra Quinn Rosa Sami Tessa Uma Viktor "
    "Wanda Xenia Yusuf Zoe Alma Basil Clara Dante Elsa Felix"
)

CITIES = _list(
    "Oslo Lisbon Kyoto Quito Tallinn Porto Bergen Nairobi Lima Hanoi Graz Turin Ghent Malmo Cork Basel Dakar "
    "Izmir Perth Sofia Tunis Vienna Zagreb Riga Cairo Delhi Paris London Berlin Madrid Rome Boston Tokyo Seoul"
)

NOUNS = _list(
    "apple river stone lamp bread chair cloud table garden window bottle basket candle pencil ladder button "
    "kettle carpet hammer feather blanket mirror pillow rocket saddle ticket violin wagon acorn bell coin drum "
    "engine flag glove hat island jar key leaf map nest onion paper quilt rope spoon tent umbrella vase wheel "
    "yarn zipper book cup door egg fork guitar honey ink jacket kite lemon mountain needle orange pear queen ring "
    "shell tree unit valley water box cake desk field gate house iron juice"
)

ANIMALS = _list("cat dog fox owl goat hen mouse pony rabbit turtle duck goose otter badger heron crow hamster lamb")

COLOURS = _list("red green blue yellow purple orange brown black white grey pink silver")

FOODS = _list("soup bread rice cheese pasta salad curry cake noodles stew beans pears olives")

JOBS = _list("baker nurse pilot teacher farmer painter singer builder driver doctor writer tailor gardener")

DAYS = _list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

_ONSETS = _list("B D F G H J K L M N P R S T V W Z Br Dr Kl Tr Sh")
_RIMES = _list("a e i o u an el in or us ara eli ino omi una ek il osh")
_ENDS = _list("na ra lo vi ko ten lin dor mar sa ti bel")


def made_up_name(rng: random.Random) -> str:
    """An invented name, so that copying a name never depends on having seen it; some are of any letters."""
    if rng.random() < 0.3:
        letters = [
            rng.choice("bcdfghjklmnpqrstvwxyz" if (i + odd) % 2 else "aaeeiioouy")
            for odd in (rng.randrange(2),)
            for i in range(rng.randint(3, 7))
        ]
        return "".join(letters).capitalize()
    return rng.choice(_ONSETS) + rng.choice(_RIMES) + rng.choice(_ENDS)


def person(rng: random.Random) -> str:
    """A first name: from the list, or made up."""
    return rng.choice(NAMES) if rng.random() < 0.6 else made_up_name(rng)


def place(rng: random.Random) -> str:
    """A city: from the list, or made up."""
    return rng.choice(CITIES) if rng.random() < 0.7 else made_up_name(rng)


def thing(rng: random.Random) -> str:
    """A noun with or without a colour."""
    noun = rng.choice(NOUNS)
    return f"{rng.choice(COLOURS)} {noun}" if rng.random() < 0.3 else noun


def article(noun: str) -> str:
    """The noun with ``a`` or ``an``."""
    return f"{'an' if noun[0] in 'aeiou' and not noun.startswith('uni') else 'a'} {noun}"


def number(rng: random.Random, digits: int) -> int:
    """A number with up to ``digits`` digits, its length drawn first so that short ones are not rare."""
    length = rng.randint(1, digits)
    return rng.randint(0 if length == 1 else 10 ** (length - 1), 10**length - 1)
