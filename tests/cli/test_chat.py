import io
import json
import os
import random
import re

import pytest

from tests.full_disk import room_for
from tokenmill.cli.chat import Chat, progress_bar
from tokenmill.cli.model_access import write_delta
from tokenmill.core.errors import InvalidRequest
from tokenmill.llm.model_protocol import Delta, PromptProgress


class Script:
    """A model that answers what it was asked last, and remembers every conversation it saw."""

    def __init__(self):
        self.seen = []
        self.closed = 0

    def chat(self, messages, fields):
        self.seen.append([(message["role"], message["content"]) for message in messages])
        asked = messages[-1]["content"]
        try:
            if asked.startswith("long"):
                yield Delta("", progress=PromptProgress(500, 2000, None))
                yield Delta("", progress=PromptProgress(1000, 2000, 3.4))
            yield Delta("you said ")
            if asked == "interrupt":
                raise KeyboardInterrupt
            if asked == "too long":
                raise InvalidRequest("no room")
            yield Delta(asked)
            yield Delta("", "stop")
        finally:
            self.closed += 1


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def talk(text: str, system=None, output=None):
    model, output = Script(), output or io.StringIO()
    chat = Chat(model, {}, system, (io.StringIO(text), output))
    chat.talk()
    assert model.closed == len(model.seen)
    return chat, model, output.getvalue()


def test_each_line_from_a_pipe_is_answered_with_the_conversation_so_far():
    _, model, output = talk("one\n\n  two  \n", system="be brief")
    assert output == "you said one\nyou said two\n"
    assert model.seen[1] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "you said one"),
        ("user", "two"),
    ]


def test_reset_forgets_the_turns_and_keeps_the_system_message():
    _, model, _ = talk("one\n/system new\n/reset\ntwo\n", system="old")
    assert model.seen[1] == [("system", "new"), ("user", "two")]


def test_exit_ends_before_what_follows():
    assert talk("one\n/exit\ntwo\n")[2] == "you said one\n"


def test_an_unknown_command_is_no_message():
    _, model, output = talk("/rest\n")
    assert model.seen == []
    assert "did you mean /reset?" in output


def test_a_path_is_a_message():
    assert talk("/usr/bin is what?\n")[1].seen == [[("user", "/usr/bin is what?")]]


def test_help_lists_the_commands():
    assert {"/reset", "/system", "/help", "/exit"} <= set(talk("/help\n")[2].split())


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said():
    _, model, output = talk("interrupt\nnext\n")
    assert output == "you said \nyou said next\n"
    assert model.seen[1][1] == ("assistant", "you said ")


def test_a_refused_message_is_reported_and_forgotten(capsys):
    chat, model, _ = talk("too long\nnext\n")
    assert "tokenmill: no room" in capsys.readouterr().err
    assert model.seen[1] == [("user", "next")]
    assert chat.failed


@pytest.mark.parametrize(
    ("stream", "expected"),
    [(Terminal(), "a]0;evil[31m\n\tb é"), (io.StringIO(), "a\x1b]0;evil\x07\x1b[31m\n\tb\x9b é")],
    ids=["terminal", "pipe"],
)
def test_an_answer_cannot_steer_the_terminal(stream, expected):
    write_delta(stream, "a\x1b]0;evil\x07\x1b[31m\n\tb\x9b é")
    assert stream.getvalue() == expected


def at_a_terminal(monkeypatch, *lines: str, columns: int = 20) -> str:
    typed = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("shutil.get_terminal_size", lambda *_, **__: os.terminal_size((columns, 24)))
    model, output = Script(), Terminal()
    Chat(model, {}, None, (Terminal(), output)).talk()
    return output.getvalue()


def test_an_answer_at_a_terminal_is_broken_between_words_in_a_colour_of_its_own(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = at_a_terminal(monkeypatch, "a sentence of several words\x1b[5m")
    assert re.sub("\x1b\\[(32|0)m", "", shown) == "you said a sentence\nof several words[5m\n"
    assert shown.count("\x1b[32m") == shown.count("\x1b[0m") > 0
    monkeypatch.setenv("NO_COLOR", "1")
    assert at_a_terminal(monkeypatch, "one") == "you said one\n"


def test_a_conversation_is_saved_as_markdown_or_json_and_overwrites_nothing(tmp_path):
    markdown, messages = tmp_path / "talk.md", tmp_path / "talk.json"
    _, _, output = talk(f"one\n/save {markdown}\n/save {messages}\n/save {markdown}\n/save\n", system="be brief")
    assert markdown.read_text() == "## system\n\nbe brief\n\n## user\n\none\n\n## assistant\n\nyou said one\n"
    assert json.loads(messages.read_text())[1:] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "you said one"},
    ]
    lines = output.splitlines()
    assert lines[1:3] == [f"3 messages in {markdown}", f"3 messages in {messages}"]
    assert lines[3] == f"cannot write {markdown}: File exists"
    assert lines[4].startswith("cannot write a file without a name")


@pytest.mark.parametrize("name", ["talk.md", "talk.json"])
def test_a_full_disk_keeps_no_part_of_a_conversation(tmp_path, name):
    for room in (0, random.randrange(1, 20)):
        with room_for(room):
            _, _, output = talk(f"one\n/save {tmp_path / name}\ntwo\n")
        assert output.splitlines()[1:] == [f"cannot write {tmp_path / name}: File too large", "you said two"]
        assert list(tmp_path.iterdir()) == []


def test_a_long_prompt_shows_a_bar_that_the_answer_replaces(monkeypatch):
    screen = at_a_terminal(monkeypatch, "long", columns=70)
    first, second = (
        progress_bar(one, 70) for one in (PromptProgress(500, 2000, None), PromptProgress(1000, 2000, 3.4))
    )
    clear = "\r\033[K"
    assert f"{clear}{first}{clear}{second}{clear}" in screen
    assert screen.index(second) < screen.index("you said")
    assert "prompt tokens" not in talk("long\n")[2], "not through a pipe"


@pytest.mark.parametrize("columns", [1, 20, 40, 80, 200])
def test_a_bar_fits_its_line(columns):
    for progress in (PromptProgress(0, 0, None), PromptProgress(10**6, 10**6, 0.0), PromptProgress(3, 10**6, 1e5)):
        assert len(progress_bar(progress, columns)) < columns or columns == 1
    assert progress_bar(PromptProgress(50, 100, 2.0), 80) == f"[{'#' * 15}{'.' * 15}] 50 of 100 prompt tokens, 2 s left"
