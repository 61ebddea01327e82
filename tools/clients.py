"""Tries the clients that people use against a running server, and prints a table of what works.

    .venv/bin/python tools/clients.py                          all of them, against a server with the demo model
    .venv/bin/python tools/clients.py --only openai llm
    .venv/bin/python tools/clients.py --write docs/clients.md

Each client is installed, in its newest version, into an environment of its own below --folder (default:
.venv/client-trials); what is there is used again. Those for Node are left out where there is no node.
`tools/client_trials/` has one program for each client.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRIALS = ROOT / "tools" / "client_trials"
START_SECONDS, TRIAL_SECONDS = 120.0, 900.0
BEGIN, END = "<!-- begin: tools/clients.py -->", "<!-- end: tools/clients.py -->"


@dataclass(frozen=True)
class Client:
    """A client: its packages, and the program that tries it."""

    name: str
    packages: tuple[str, ...]
    program: str

    @property
    def is_for_node(self) -> bool:
        """Return True if npm installs it, not pip."""
        return self.program.endswith(".mjs")


CLIENTS = (
    Client("openai", ("openai",), "with_openai.py"),
    Client("openai (node)", ("openai",), "with_openai_node.mjs"),
    Client("anthropic", ("anthropic",), "with_anthropic.py"),
    Client("langchain-openai", ("langchain-openai",), "with_langchain_openai.py"),
    Client("litellm", ("litellm",), "with_litellm.py"),
    Client("llama-index", ("llama-index-core", "llama-index-llms-openai-like"), "with_llama_index.py"),
    Client("instructor", ("instructor",), "with_instructor.py"),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]",), "with_pydantic_ai.py"),
    Client("openai-agents", ("openai-agents",), "with_openai_agents.py"),
    Client("smolagents", ("smolagents[openai]",), "with_smolagents.py"),
    Client("llm", ("llm",), "with_llm.py"),
    Client("aider", ("aider-chat",), "with_aider.py"),
    Client("ai (Vercel)", ("ai", "@ai-sdk/openai-compatible", "zod"), "with_vercel_ai.mjs"),
    Client("lm-eval", ("lm-eval[api]", "transformers"), "with_lm_eval.py"),
    # torch first, in the build that this interpreter's pip finds: guidellm alone would take the largest.
    Client("guidellm", ("guidellm", "torch"), "with_guidellm.py"),
)


@dataclass(frozen=True)
class Trial:
    """The trial of one client: its version, and the error of each call (empty: it works)."""

    client: Client
    version: str
    calls: dict[str, str]


def main() -> int:
    """Install, try, print; 0 if every client could be tried."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server with the demo model; default: one is started")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv" / "client-trials", help="for the environments")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[client.name for client in CLIENTS])
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the marks of this document")
    arguments = parser.parse_args()
    chosen = [client for client in CLIENTS if arguments.only is None or client.name in arguments.only]
    with server(arguments.url) as url:
        trials = [
            trial for client in chosen if (trial := try_client(client, arguments.folder.resolve(), url)) is not None
        ]
    text = table(trials, datetime.datetime.now(datetime.UTC).date().isoformat())
    print(text)
    if arguments.write is not None:
        arguments.write.write_text(with_table(arguments.write.read_text(encoding="utf-8"), text), encoding="utf-8")
    return int(len(trials) < len(chosen))


@contextlib.contextmanager
def server(url: str | None) -> Iterator[str]:
    """The address of a server with the demo model: a running one, or one of our own until the end."""
    if url is not None:
        yield url.rstrip("/")
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tokenmill", "serve", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _wait(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(0.2)
    raise SystemExit("the server did not start: try `tokenmill serve`")


def try_client(client: Client, folder: Path, url: str) -> Trial | None:
    """Run its program in its environment; None: it cannot be installed here."""
    print(f"{client.name} ...", file=sys.stderr, flush=True)
    home = folder / client.program.partition(".")[0]
    command = _install(client, home)
    if command is None:
        print(f"{client.name}: cannot be installed here", file=sys.stderr)
        return None
    from tokenmill.demo import demo_model_path

    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment |= {"TOKENMILL_URL": url, "TOKENMILL_MODEL_FOLDER": str(demo_model_path())}
    try:
        done = subprocess.run(
            command, env=environment, cwd=home, capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False
        )
        said, rest = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        said, rest = _text(error.stdout), "the program does not end"
    calls = dict(_results(said))
    if not calls:
        calls = {"the program itself": " ".join(rest.split())[-300:] or "it said nothing"}
    return Trial(client, _version(client, home), calls)


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _results(said: str) -> Iterator[tuple[str, str]]:
    for line in said.splitlines():
        if line.startswith('{"call"'):
            result = json.loads(line)
            yield result["call"], result["error"]


def _install(client: Client, home: Path) -> list[str] | None:
    """The command that runs the client's program, once its environment is there."""
    if client.is_for_node:
        return _install_node(client, home)
    python = home / "bin" / "python"
    ready = home / ".ready"
    if not ready.exists():
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--upgrade"]
        steps = ([sys.executable, "-m", "venv", str(home)], [*pip, *reversed(client.packages)])
        if not all(subprocess.run(step, check=False).returncode == 0 for step in steps):
            return None
        ready.touch()
    return [str(python), str(TRIALS / client.program)]


def _install_node(client: Client, home: Path) -> list[str] | None:
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        return None
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "node_modules").exists():
        (home / "package.json").write_text('{"private": true}')
        if subprocess.run([npm, "install", "--silent", *client.packages], cwd=home, check=False).returncode != 0:
            return None
    # Modules are looked for from where a program lies.
    for name in ("report.mjs", client.program):
        shutil.copy(TRIALS / name, home)
    return [node, str(home / client.program)]


def _version(client: Client, home: Path) -> str:
    package = client.packages[0].partition("[")[0]
    if client.is_for_node:
        return json.loads((home / "node_modules" / package / "package.json").read_text())["version"]
    code = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
    command = [str(home / "bin" / "python"), "-c", code, package]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(trials: list[Trial], date: str) -> str:
    """Markdown: a row for each client, and below it what does not work and why."""
    from tokenmill import __version__

    lines = [f"Tried on {date} with TokenMill {__version__} and the demo model.", ""]
    lines += ["| client | version | works | does not |", "|---|---|---|---|"]
    failures = []
    for trial in trials:
        good = [call for call, error in trial.calls.items() if not error]
        bad = {call: error for call, error in trial.calls.items() if error}
        lines.append(f"| {trial.client.name} | {trial.version} | {'; '.join(good) or '-'} | {'; '.join(bad) or '-'} |")
        failures += [f"- {trial.client.name}, {call}: {_cell(error)}" for call, error in bad.items()]
    return "\n".join([*lines, "", *failures]).rstrip() + "\n"


def _cell(error: str) -> str:
    return "`" + error.replace("`", "'") + "`"


def with_table(document: str, text: str) -> str:
    """The document with the table between its marks."""
    head, _, rest = document.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{text}{END}{tail}"


if __name__ == "__main__":
    sys.exit(main())
