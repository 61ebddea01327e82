"""Word lists and made-up names that the other generators draw from. Invented or ordinary words only."""

from __future__ import annotations

import random


def listed(words: str) -> list[str]:
    """The words of a text."""
    return words.split()


NAMES = listed(
    "Mira Tobin Lena Orin Pia Jarek Selma Nils Tamsin Odo Ruta Bram Ilse Kato Wren Dorin Yara Fenn Anouk Piet "
    "Sanna Ravi Noor Emil Greta Hugo Ines Jonas Kira Luca Maya Nadia Oscar Petra Quinn Rosa Sami Tessa Uma Viktor "
    "Wanda Xenia Yusuf Zoe Alma Basil Clara Dante Elsa Felix"
)

MORE_NAMES = listed(
    "Ada Alice Amir Anna Ben Bob Carol Carlos Chen Clara Daniel David Diana Ella Emma Eva Eve Finn Frank Freya George "
    "Grace Hana Hannah Henry Ibrahim Ivan Jack James Jane Jasmine John Julia Karim Kenji Laura Leo Liam Lily Linda "
    "Lucy Marco Maria Mark Marta Mary Max Mia Mohamed Nina Noah Olga Oliver Olivia Omar Paul Paula Peter Priya Rachel "
    "Robert Sam Samuel Sara Sarah Simon Sofia Sophie Steve Susan Theo Thomas Tim Tom Victor Will Yuki Zara"
)

CITIES = listed(
    "Oslo Lisbon Kyoto Quito Tallinn Porto Bergen Nairobi Lima Hanoi Graz Turin Ghent Malmo Cork Basel Dakar "
    "Izmir Perth Sofia Tunis Vienna Zagreb Riga Cairo Delhi Paris London Berlin Madrid Rome Boston Tokyo Seoul"
)

NOUNS = listed(
    "apple river stone lamp bread chair cloud table garden window bottle basket candle pencil ladder button "
    "kettle carpet hammer feather blanket mirror pillow rocket saddle ticket violin wagon acorn bell coin drum "
    "engine flag glove hat island jar key leaf map nest onion paper quilt rope spoon tent umbrella vase wheel "
    "yarn zipper book cup door egg fork guitar honey ink jacket kite lemon mountain needle orange pear queen ring "
    "shell tree unit valley water box cake desk field gate house iron juice"
)

ANIMALS = listed("cat dog fox owl goat hen mouse pony rabbit turtle duck goose otter badger heron crow hamster lamb")

COLOURS = listed("red green blue yellow purple orange brown black white grey pink silver")

FOODS = listed("soup bread rice cheese pasta salad curry cake noodles stew beans pears olives")

JOBS = listed("baker nurse pilot teacher farmer painter singer builder driver doctor writer tailor gardener")

DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

_ONSETS = listed(
    "b c d f g h j k l m n p r s t v w x y z bl br ch cl cr dr fl fr gl gr kl kr ph pl pr qu sc sh sk sl sm sn sp st "
    "sv sw th tr tw vl wh zw"
)
_VOWELS = listed("a a a e e e i i i o o o u u y ai au ea ee ia ie io oa ou ui")
_CODAS = listed("b ck d f g k l ll m n n n ng p r r r s s sh st t th v x z nd rk lt")


def _syllable(rng: random.Random, is_last: bool) -> str:
    coda = rng.choice(_CODAS) if rng.random() < (0.5 if is_last else 0.25) else ""
    return rng.choice(_ONSETS) + rng.choice(_VOWELS) + coda


def made_up_name(rng: random.Random) -> str:
    """An invented name of millions, so that copying one never depends on having seen it; some are of any letters."""
    if rng.random() < 0.25:
        letters = [
            rng.choice("bcdfghjklmnpqrstvwxyz" if (i + odd) % 2 else "aaeeiioouy")
            for odd in (rng.randrange(2),)
            for i in range(rng.randint(3, 7))
        ]
        return "".join(letters).capitalize()
    count = rng.choice((1, 2, 2, 2, 3, 3))
    name = "".join(_syllable(rng, i == count - 1) for i in range(count))
    if rng.random() < 0.15:
        name = rng.choice("aeiou") + name
    return name.capitalize()


def person(rng: random.Random) -> str:
    """A first name: from the lists, or made up."""
    draw = rng.random()
    return rng.choice(NAMES if draw < 0.35 else MORE_NAMES) if draw < 0.6 else made_up_name(rng)


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
