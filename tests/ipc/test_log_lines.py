"""No text makes a line of the log that is not ours, in any form in which lines are written."""

import io
import json
import logging
import sys

import pytest

from tokenmill.ipc.log_lines import FORMAT_WITH_TIME, LineHandler, escaped, escaped_json
from tokenmill.serving.observe.event_log import EventLog

EVIL = "x\nERROR forged\r\x1b[31m\x00\x7f\x85\x9b2J\u2028\u2029\u202e\u2066"
HARMLESS = "Grüße, 你好 🙂 \\n {}%s"


def is_one_line(text):
    return len(text.splitlines()) == 1 and text.isprintable()


def test_a_message_stays_in_its_line():
    lines = []
    EventLog(lines.append, as_json=False).note("request", f"{EVIL}: done", id=EVIL)
    EventLog(lines.append, as_json=True).note("request", f"{EVIL}: done", id=EVIL)
    assert [is_one_line(line) for line in lines] == [True, True]
    told = json.loads(lines[1])
    assert (told["message"], told["id"]) == (f"{EVIL}: done", EVIL), "JSON says the same in other words"


def test_what_is_harmless_stays_as_it_is():
    assert escaped(HARMLESS) == HARMLESS
    assert escaped_json(json.dumps(HARMLESS, ensure_ascii=False)) == json.dumps(HARMLESS, ensure_ascii=False)
    assert escaped("a\nb\x1b") == "a\\nb\\x1b"
    assert escaped("\ud800") == "\\ud800", "which could not be written at all"


@pytest.fixture
def lines():
    return []


@pytest.fixture
def logger(lines):
    logger = logging.Logger("test")
    logger.addHandler(LineHandler(write=lines.append))
    return logger


def test_a_log_record_is_one_line(logger, lines):
    logger.error("request %s", EVIL)
    logger.warning("ends with a line feed\n")
    assert [is_one_line(line) for line in lines] == [True, True]
    assert lines[1] == "WARNING test: ends with a line feed"


def test_an_exception_cannot_write_a_line_of_its_own(logger, lines):
    try:
        try:
            raise ValueError(EVIL)
        except ValueError as error:
            raise KeyError('{}\n  File "forged"') from error
    except KeyError:
        logger.exception("it failed")
    assert all(is_one_line(line) for line in lines)
    assert lines[0] == "ERROR test: it failed"
    assert all(line.startswith("  | ") for line in lines[1:]), "behind a bar"
    assert any("raise ValueError(EVIL)" in line for line in lines), "frames are shown"
    assert [line for line in lines if "forged" in line and "ValueError" in line] == [f"  | ValueError: {escaped(EVIL)}"]


def test_children_write_to_standard_error(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logger = logging.Logger("child")
    logger.addHandler(LineHandler(FORMAT_WITH_TIME))
    logger.error(EVIL)
    assert stream.getvalue().endswith(f"ERROR child: {escaped(EVIL)}\n")
