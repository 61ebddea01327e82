"""docs/flags.md and the table that the parser reads are one."""

from tools.flags_page import PAGE, page


def test_the_page_of_flags_is_what_the_table_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python tools/flags_page.py"
