"""Names of GGUF files: parts of split files, and which file of several is meant, by llama.cpp's rules.

Knows names only: no file is opened, and no hub is asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from tokenmill.core.errors import InvalidCheckpoint

SUFFIX = ".gguf"
# The default where no file is named.
PREFERRED = ("Q4_K_M", "Q8_0")
# Files beside a model that are no language models: towers, statistics, drafts.
_OTHERS = re.compile(r"mmproj|imatrix|mtp-|eagle3-|dflash-|dspark-")
_TOWER = re.compile(r"mmproj.*\.gguf")
# Q4_K_M, IQ4_XS, BF16, UD-Q6_K: the first number are the bits.
_BITS = re.compile(r"(?<![A-Za-z0-9])(?:I?Q|B?F|MXFP)(\d+)", re.IGNORECASE)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SHOWN = 12


class SplitPlace(msgspec.Struct, frozen=True):
    """The part of a split file that a name stands for; parts count from 1."""

    stem: str
    number: int
    count: int

    def part(self, number: int) -> str:
        """Return the name of another part."""
        return f"{self.stem}-{number:05}-of-{self.count:05}{SUFFIX}"


def split_place(name: str) -> SplitPlace | None:
    """Return the place of a part of a split file; None: the name is that of a whole file."""
    match = _SPLIT.fullmatch(name)
    return SplitPlace(match["stem"], int(match["number"]), int(match["count"])) if match else None


def split_tag(model: str) -> tuple[str, str | None]:
    """Return `owner/name` and the tag of `owner/name:TAG`; None: no tag is given."""
    name, colon, tag = model.rpartition(":")
    return (name, tag) if colon and tag and "/" in name and "/" not in tag else (model, None)


def choose_file(names: Sequence[str], tag: str | None, where: str) -> str:
    """Return the file of several that a tag means; without one, `PREFERRED`, then the first.

    Args:
        names: paths in a folder or repository; only those of models are considered.
        where: the folder or repository, for messages.

    Raises:
        InvalidCheckpoint: no file fits; the message lists those that there are.
    """
    models = sorted(name for name in names if is_model(name))
    if not models:
        raise InvalidCheckpoint(f"{where} has no GGUF file of a language model")
    for wanted in PREFERRED if tag is None else (tag,):
        found = [name for name in models if re.search(re.escape(wanted) + r"[.-]", name, re.IGNORECASE)]
        if found:
            return found[0]
    if tag is None:
        return models[0]
    more = f" and {len(models) - _SHOWN} more" if len(models) > _SHOWN else ""
    raise InvalidCheckpoint(f"{where} has no GGUF file for {tag!r}; it has: {', '.join(models[:_SHOWN])}{more}")


def choose_tower(names: Sequence[str], model: str) -> str | None:
    """Return the file with the vision tower of a model, by llama.cpp's rule; None: there is no such file.

    Of several in the model's folder, or else in the nearest above it, it is the one with the most similar bits.

    Args:
        names: paths in a folder or repository. model: one of them.
    """
    folder = model.rpartition("/")[0]
    towers = [name for name in names if _TOWER.search(name.rpartition("/")[2])]
    places = {name: name.rpartition("/")[0] for name in towers}
    near = [name for name in towers if not places[name] or f"{folder}/".startswith(f"{places[name]}/")]
    bits = _num_bits(model)
    return min(near, key=lambda name: (-len(places[name]), abs(_num_bits(name) - bits), name), default=None)


def _num_bits(name: str) -> int:
    match = _BITS.search(name.rpartition("/")[2])
    return int(match[1]) if match else 0


def with_parts(name: str, names: Sequence[str]) -> list[str]:
    """Return a file of a list with all parts of it, in order."""
    place = split_place(name)
    if place is None:
        return [name]
    wanted = {place.part(number) for number in range(1, place.count + 1)}
    return sorted(one for one in names if one in wanted)


def is_model(name: str) -> bool:
    """Return True for the file of a language model, or its first part, by its name."""
    file = name.rpartition("/")[2]
    place = split_place(file)
    return file.endswith(SUFFIX) and not _OTHERS.search(file) and (place is None or place.number == 1)
