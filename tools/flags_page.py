"""docs/flags.md from the table of other engines' flags.

python tools/flags_page.py [--check]
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

from tokenmill.config.foreign_flags import ENGINES, ForeignFlag, foreign_flags

PAGE = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
HEAD = """# Flags of vLLM, SGLang and llama.cpp

What `tokenmill serve` makes of the command lines and `--config` files of three other engines. This page is written by
`python tools/flags_page.py` from `src/tokenmill/config/foreign_flags.toml`, which the parser reads when it meets a flag
that is not ours. A value in brackets changes nothing and is always taken, `{}` is any JSON object that holds nothing
but zeros, and so are `none`, `null` and the negation `--no-...` of a switch.
"""


def page() -> str:
    """The whole page."""
    flags = list(foreign_flags().values())
    same = [flag for flag in flags if flag.here == "same"]
    others = [flag for flag in flags if flag.here.startswith("-")]
    sections = [
        HEAD,
        "## The same here\n\n" + textwrap.fill(", ".join(map(_name, same)) + ".", 118, break_on_hyphens=False) + "\n",
        "## Another name here\n\n| flag | of | here |\n|---|---|---|\n"
        + "".join(f"| {_name(flag)} | {_engines(flag)} | {_ours(flag)} |\n" for flag in others),
        "## Not supported\n\nRefused with exit code 2 and the reason.\n\n" + _grouped(flags, "refused"),
        "## Does nothing here\n\nTaken, with one line that says why.\n\n" + _grouped(flags, "nothing"),
    ]
    return "\n".join(sections)


def _grouped(flags: list[ForeignFlag], here: str) -> str:
    reasons = dict.fromkeys(flag.because for flag in flags if flag.here == here)
    rows = ["| because | flags |\n|---|---|\n"]
    for because in reasons:
        names = ", ".join(_name(flag) for flag in flags if (flag.here, flag.because) == (here, because))
        rows.append(f"| {because} | {names} |\n")
    return "".join(rows)


def _name(flag: ForeignFlag) -> str:
    neutral = " or ".join(f"`{value}`" for value in flag.neutral)
    return f"`{flag.name}`" + (f" ({neutral})" if neutral else "")


def _ours(flag: ForeignFlag) -> str:
    if flag.field:
        return f'`{flag.here} {{"{flag.field}": VALUE}}`'
    return f"`{flag.here}`" + "".join(f", `{theirs}` is `{ours}`" for theirs, ours in flag.values.items())


def _engines(flag: ForeignFlag) -> str:
    return ", ".join(engine for engine in ENGINES.values() if engine in flag.engines)


def main() -> int:
    """Write the page; with --check only say whether it is up to date."""
    if "--check" in sys.argv:
        return int(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
