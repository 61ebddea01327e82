"""All that the page says stands in one table, in five languages; no text of its sources bypasses it."""

import re

import pytest

from tokenmill.serving.server.http.page import FOLDER

LANGUAGES = ("en", "de", "zh", "fr", "es")
SOURCES = sorted(path for path in FOLDER.glob("*.js") if path.name != "texts.js")
ENTRY = re.compile(r'^  "([\w.]+)": "((?:[^"\\]|\\.)*)",$')
PLACE = re.compile(r"\{(\w+)\}")
# Words that are names, the same in all languages, and what stands in a table's place where it has not come yet.
NAMES = {"TokenMill", "Enter", "Shift", "Esc", "Ctrl", "K", "O", "S", "openapi.json"}
# Sentences that the page shows nowhere: examples that are sent, code that is copied, names in files, reasons of ours.
UNSHOWN = {
    "Once upon a time",
    "turn without a step",
    "the line was silent",
    "Where is the mill?",
    "By the river.",
    "It is late.",
}
SPOKEN = ("aria-label", "title", "placeholder", "alt", "label", "aria-valuetext")


def table(language):
    lines = (FOLDER / "texts" / f"{language}.js").read_text().splitlines()
    entries = [ENTRY.match(line) for line in lines if line.startswith("  ")]
    assert all(entries), [line for line, entry in zip(lines, entries, strict=False) if not entry]
    found = {entry[1]: entry[2] for entry in entries}
    assert len(found) == len(entries), "a name stands twice"
    return found


ENGLISH = table("en")


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_text_is_there_in_each_language_with_the_same_places(language):
    found = table(language)
    assert list(found) == list(ENGLISH), "the same names in the same order"
    for name, text in found.items():
        assert text.strip(), name
        assert set(PLACE.findall(text)) == set(PLACE.findall(ENGLISH[name])), name
    if language != "en":
        same = [name for name, text in found.items() if text == ENGLISH[name] and len(text) > 12]
        assert len(same) <= len(found) // 20, same


def names_used():
    """Names of texts in the sources: whole ones, and beginnings of those that are put together."""
    whole, beginnings = set(), set()
    for path in SOURCES:
        text = path.read_text()
        whole |= {one for one in re.findall(r'"([\w.]+)"', text) if one in ENGLISH}
        beginnings |= set(re.findall(r"\bt\(`([\w.]+\.)\$\{", text))
    return whole, beginnings


def test_every_text_is_used_and_every_text_that_is_used_is_there():
    whole, beginnings = names_used()
    unused = [name for name in ENGLISH if name not in whole and not name.startswith(tuple(beginnings))]
    assert unused == []
    for path in SOURCES:
        for name in re.findall(r'\b(?:t|parts|fact)\("([\w.]+)"', path.read_text()):
            assert name in ENGLISH, f"{path.name}: {name}"


def templates(source):
    """The literal parts of html`...` in a source, those within `${}` as templates of their own."""
    found, stack, at = [], [], 0
    while at < len(source):
        if stack and stack[-1][0] == "template":
            if source[at] == "`":
                found.append((stack[-1][1], "".join(stack.pop()[2])))
            elif source.startswith("${", at):
                stack[-1][2].append("\0")
                stack.append(("code", 0, 0))
                at += 1
            else:
                stack[-1][2].append(source[at])
        elif source[at] == "`":
            stack.append(("template", source[:at].endswith("html"), []))
        elif source[at] in "\"'":
            at = end_of_string(source, at)
        elif source.startswith("//", at) and (at == 0 or source[at - 1] in "\n ;"):
            at = source.index("\n", at)
        elif stack and source[at] in "{}":
            kind, depth, _ = stack.pop()
            depth += 1 if source[at] == "{" else -1
            if depth >= 0:
                stack.append((kind, depth, 0))
        at += 1
    return [text for is_html, text in found if is_html]


def end_of_string(source, at):
    quote, at = source[at], at + 1
    while source[at] != quote and source[at] != "\n":
        at += 2 if source[at] == "\\" else 1
    return at


def test_templates_are_found():
    source = 'const a = html`<b title=${t("x")}>One ${list.map((one) => html`<i alt="Two">${one}</i>`)}</b>`; // it`s'
    assert templates(source + "\n") == ['<i alt="Two">\0</i>', "<b title=\0>One \0</b>"]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_text_of_a_source_bypasses_the_table(path):
    source = path.read_text()
    for text in templates(source):
        spoken = re.findall(rf'(?:{"|".join(SPOKEN)})="([^"]*)"', text)
        outside = re.sub(r"<[^<>]*>", " ", re.sub(r'="[^"]*"', "", text))
        words = re.findall(r"[^\W\d_]{2,}", " ".join([outside, *spoken]).replace("openapi.json", ""))
        assert set(words) <= NAMES, text
    # A sentence in quotes would be shown, but where only a developer reads it.
    code = re.sub(r"^\s*//.*$", "", source, flags=re.MULTILINE)
    for line in code.splitlines():
        for one in re.findall(r'"((?:[^"\\]|\\.)*)"', re.sub(r'class="[^"]*"', "", line)):
            is_code = path.name == "body.js" and one.lstrip().startswith(("from ", "for ", "stream "))
            is_text = re.match(r"[A-Z]?[a-z]+ [a-z]+ [a-z]+", one) and one not in UNSHOWN
            assert is_code or not is_text, f"{path.name}: {one}"
