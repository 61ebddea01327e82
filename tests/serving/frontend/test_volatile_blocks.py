"""Blocks that agents change with each call are kept out of what the prefix cache could supply."""

from pathlib import Path

import pytest

from tokenmill.serving.frontend.chat_messages import normalize_messages
from tokenmill.serving.frontend.volatile_blocks import CAUSES, RULES, UNKNOWN, cause_of, settle

HEADER = "x-anthropic-billing-header: cc_version=2.1.36.b5c; cc_entrypoint=cli; cch=ab12c;"
STATUS = "gitStatus: This is the git status at the start of the conversation.\nCurrent branch: main\n\nRecent:\nab12 x"
ENV = "You are a coder.\n<env>\n  Working directory: /w\n  Today's date: Mon Nov 23 2026\n</env>\nBe brief."
HELLO = {"role": "user", "content": "hello"}


def system(*parts, marked=()):
    mark = {"cache_control": {"type": "ephemeral"}}
    texts = [{"type": "text", "text": text} | (mark if i in marked else {}) for i, text in enumerate(parts)]
    return {"role": "system", "content": texts}


def test_what_no_rule_knows_stays_as_it_is():
    messages = [
        {"role": "system", "content": "be brief"},
        HELLO,
        {"role": "assistant", "content": None, "tool_calls": []},
    ]
    assert settle(messages) == (messages, [])
    assert settle([]) == ([], [])
    assert settle([HELLO]) == ([HELLO], [])


@pytest.mark.parametrize("content", ["{}\nbe brief", [{"type": "text", "text": "{}\nbe brief"}]])
def test_a_changing_header_is_dropped(content):
    prompts = []
    for header in (HEADER, HEADER.replace("ab12c", "99f01")):
        text = content if isinstance(content, list) else content.format(header)
        if isinstance(content, list):
            text = [{**content[0], "text": content[0]["text"].format(header)}]
        messages, names = settle([{"role": "system", "content": text}, HELLO])
        assert names == ["claude-billing-header"]
        prompts.append(normalize_messages(messages))
    assert prompts[0] == prompts[1] == [{"role": "system", "content": "be brief"}, HELLO]


def test_a_block_that_is_nothing_else_leaves_no_trace():
    messages, names = settle([system(HEADER, "be brief", "now", marked=(1, 2)), HELLO])
    assert normalize_messages(messages)[0] == {"role": "system", "content": "be brief\nnow"}
    assert settle([system(HEADER), HELLO]) == ([HELLO], names)
    assert settle([{"role": "system", "content": HEADER}, HELLO]) == ([HELLO], names)


def test_a_header_within_a_text_or_from_the_user_is_the_clients_own():
    for messages in (
        [{"role": "system", "content": f"the header\n{HEADER}"}, HELLO],
        [{"role": "user", "content": HEADER}],
        [HELLO, {"role": "system", "content": HEADER}],
    ):
        assert settle(messages) == (messages, [])


def test_blocks_are_moved_to_the_head_of_the_first_user_message():
    messages, names = settle([{"role": "system", "content": f"{ENV}\n\n{STATUS}"}, HELLO])
    assert names == ["claude-git-status", "env-date"]
    assert messages[0]["content"] == ENV.replace("\n  Today's date: Mon Nov 23 2026", "") + "\n\n"
    assert messages[1] == {"role": "user", "content": f"{STATUS}\nToday's date: Mon Nov 23 2026\n\nhello"}
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    messages, _ = settle([{"role": "system", "content": ENV}, {"role": "user", "content": parts}])
    assert messages[1]["content"] == [{"type": "text", "text": "Today's date: Mon Nov 23 2026\n"}, *parts]


def test_nothing_is_moved_past_a_mark_of_the_client_nor_without_a_place():
    marked = [system("rules", STATUS, marked=(1,)), HELLO]
    assert settle(marked) == (marked, [])
    before = [system("rules", STATUS, "more", marked=(2,)), HELLO]
    assert settle(before) == (before, [])
    behind, names = settle([system("rules", STATUS, marked=(0,)), HELLO])
    assert names == ["claude-git-status"]
    assert behind[0]["content"] == [{"type": "text", "text": "rules", "cache_control": {"type": "ephemeral"}}]
    assert behind[1]["content"].startswith("gitStatus:")
    for rest in ([], [{"role": "assistant", "content": "hm"}], [{"role": "user", "content": None}]):
        alone = [{"role": "system", "content": ENV}, *rest]
        assert settle(alone) == (alone, [])


def test_messages_of_the_client_are_not_changed():
    given = [system(HEADER, f"{ENV}\n{STATUS}"), {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    kept = repr(given)
    settle(given)
    assert repr(given) == kept


def test_odd_content_is_left_to_those_who_check_it():
    for content in (None, 3, {"text": HEADER}, [3, None, {"type": "text"}, {"type": "text", "text": 3}]):
        messages = [{"role": "system", "content": content}, HELLO]
        assert settle(messages) == (messages, [])


@pytest.mark.parametrize(
    "text", ["<env>" * 200_000, "<env>\n" + " \n" * 500_000, "gitStatus:" * 100_000, "\n" * 1_000_000]
)
def test_no_text_takes_long(text):
    text += "\n  Today's date: x"
    settle([{"role": "system", "content": text}, HELLO])


def test_causes_are_named_by_marks():
    assert cause_of("cch=12\nx-anthropic-billing-header: a") == "claude-billing-header"
    assert cause_of("nothing known") == UNKNOWN
    assert len({*CAUSES}) == len(RULES) + 1
    assert all(rule.evidence and rule.mark for rule in RULES)


def test_the_page_has_a_row_for_each_rule():
    page = (Path(__file__).parents[3] / "docs" / "prefixes.md").read_text()
    table = page[page.index("| rule |") : page.index("- Moved means")]
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    assert {*rows} == {rule.name for rule in RULES}
    done = {"drop": "| dropped |", "move": "| moved |", "report": "| only named as a cause |"}
    assert all(done[rule.action] in rows[rule.name] and rule.evidence in rows[rule.name] for rule in RULES)
