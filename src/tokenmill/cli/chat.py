"""`tokenmill chat`: talk to a model in the terminal, or line by line from a pipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tokenmill.cli.model_access import add_access_flags, harmless, open_access, write_delta
from tokenmill.cli.sampling_flags import add_sampling_flags, sampling_fields
from tokenmill.config.parser import Parser
from tokenmill.core.errors import TokenMillError
from tokenmill.core.names import did_you_mean
from tokenmill.core.whole_file import removed_on_failure
from tokenmill.llm.model_protocol import Messages, ModelAccess, PromptProgress

# Colours of a prompt are marked for readline, which must not count them as characters.
PROMPT = "\001\033[1;36m\002you> \001\033[0m\002"
ANSWER, PLAIN = "\033[32m", "\033[0m"
_COMMAND = re.compile(r"/[a-z]+")
_COMMANDS = {
    "/reset": "forget the conversation, keep the system message",
    "/system": "set the system message: /system You answer in one word.",
    "/save": "write the conversation to a file: /save talk.md, or talk.json for its messages",
    "/help": "this list",
    "/exit": "end (also Ctrl-D); Ctrl-C stops an answer",
}


def run(arguments: Sequence[str]) -> int:
    """Talk until /exit or the end of input; 1 if an answer failed.

    Raises:
        TokenMillError: the local model cannot be loaded.
    """
    namespace = make_parser().parse(arguments)
    chat = Chat(open_access(namespace), sampling_fields(namespace), namespace.system)
    chat.talk()
    return int(chat.failed)


def make_parser() -> Parser:
    """Return the parser of `chat`."""
    parser = Parser("chat", "Talk to a running server, or with --local to a model in this process.")
    add_access_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_flags(parser)
    return parser


class Chat:
    """One conversation: its messages, and the loop that reads and answers."""

    def __init__(
        self,
        model: ModelAccess,
        fields: Mapping[str, Any],
        system: str | None = None,
        streams: tuple[IO[str], IO[str]] | None = None,
    ) -> None:
        """Begin a conversation; `streams` are the input of lines and the output of answers; None: the process's own."""
        self._model = model
        self._fields = fields
        self._system = system
        self._input: IO[str] = streams[0] if streams else sys.stdin
        self._output: IO[str] = streams[1] if streams else sys.stdout
        self._said: Messages = []
        self._interactive = self._input.isatty() and self._output.isatty()
        self._has_colours = self._interactive and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._shows_progress = False
        self.failed = False

    @property
    def messages(self) -> Messages:
        """The conversation to send: the system message, if any, and all turns."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, *self._said]

    def talk(self) -> None:
        """Answer lines until /exit or the end of input."""
        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  importing it gives input() history and editing
            print("Type a message; /help lists the commands.")
        for line in self._lines():
            if _COMMAND.fullmatch(line.split(maxsplit=1)[0]):
                if line.split()[0] == "/exit":
                    return
                self._obey(line)
            else:
                self._answer(line)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                line = input(PROMPT if self._has_colours else "> ") if self._interactive else self._input.readline()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print("\n(/exit or Ctrl-D ends)")
                continue
            if not self._interactive and not line:
                return
            if line.strip():
                yield line.strip()

    def _obey(self, line: str) -> None:
        command, _, rest = line.partition(" ")
        match command:
            case "/reset":
                self._said.clear()
            case "/system":
                self._system = rest.strip() or None
            case "/save":
                self._save(rest.strip())
            case "/help":
                for name, purpose in _COMMANDS.items():
                    self._say(f"{name:<9}{purpose}\n")
            case _:
                self._say(f"unknown command {command} (/help lists the commands){did_you_mean(command, _COMMANDS)}\n")

    def _save(self, name: str) -> None:
        if name.endswith(".json"):
            text = json.dumps(self.messages, ensure_ascii=False, indent=2) + "\n"
        else:
            text = "\n".join(f"## {message['role']}\n\n{message['content']}\n" for message in self.messages)
        try:
            # Opened so that a file that is there already stays as it is.
            with open(name, "x", encoding="utf-8") as file, removed_on_failure(Path(name)):
                file.write(text)
                file.flush()
            self._say(f"{len(self.messages)} messages in {name}\n")
        except OSError as error:
            self._say(f"cannot write {name or 'a file without a name'}: {error.strerror}\n")

    def _answer(self, line: str) -> None:
        self._said.append({"role": "user", "content": line})
        text, reason, show = "", None, self._shown()
        try:
            # Closed at once when Ctrl-C ends the loop: the close is what stops the generation.
            with contextlib.closing(self._model.chat(self.messages, self._fields)) as deltas:
                for delta in deltas:
                    self._show_progress(delta.progress)
                    text += delta.text
                    reason = delta.finish_reason or reason
                    show(delta.text)
        except KeyboardInterrupt:
            self._show_progress(None)
            reason = "stopped"
        except TokenMillError as error:
            self.failed = True
            self._show_progress(None)
            self._said.pop()
            show(None)
            print(f"{'' if text == '' else chr(10)}tokenmill: {error}", file=sys.stderr)
            return
        show(None)
        self._say("\n")
        if self._interactive and reason in ("stopped", "length"):
            self._say("(stopped)\n" if reason == "stopped" else "(the answer reached its length limit)\n")
        self._said.append({"role": "assistant", "content": text})

    def _show_progress(self, progress: PromptProgress | None) -> None:
        """Show how far the prompt is computed, in a line of its own that the answer replaces."""
        if not self._interactive or (progress is None and not self._shows_progress):
            return
        line = "" if progress is None else progress_bar(progress, shutil.get_terminal_size().columns)
        self._output.write("\r\033[K" + line)
        self._output.flush()
        self._shows_progress = progress is not None

    def _shown(self) -> Callable[[str | None], None]:
        """Return a function that shows an answer in pieces, None at its end: in colour, and wrapped between words."""
        if not self._interactive:
            return lambda text: self._say(text or "")
        from tokenmill.cli.word_wrap import WordWrap

        wrap = WordWrap(shutil.get_terminal_size().columns)
        before, after = (ANSWER, PLAIN) if self._has_colours else ("", "")

        def show(text: str | None) -> None:
            piece = wrap.flush() if text is None else wrap.feed(harmless(text))
            if piece:
                # Each piece by itself, so that nothing that ends the program leaves the terminal coloured.
                self._output.write(before + piece + after)
                self._output.flush()

        return show

    def _say(self, text: str) -> None:
        write_delta(self._output, text)


def progress_bar(progress: PromptProgress, columns: int) -> str:
    """Return a bar, the tokens of a prompt that are computed, and the seconds left, in one line of the terminal."""
    done, most = progress.num_computed, max(1, progress.num_tokens)
    left = "" if progress.seconds_left is None else f", {progress.seconds_left:.0f} s left"
    words = f" {done:,} of {most:,} prompt tokens{left}"
    width = max(0, min(30, columns - len(words) - 3))
    filled = width * done // most
    return f"[{'#' * filled}{'.' * (width - filled)}]{words}"[: max(0, columns - 1)]
