"""A coding agent's session against a server: what each turn computes beside its new tokens.

    python benchmarks/agent_session.py [--tokens 20000] [--turns 40] [--agents 3] [--volatile-blocks keep]
    python benchmarks/agent_session.py --url http://127.0.0.1:8080     a server that runs: nothing of it is killed
    python benchmarks/agent_session.py --header stays                  the client is patched: its header is the same

The shape is recorded from Claude Code: tools and a long system prompt behind a header that is another in every call,
turns of a call and its result, sub-agents with a system prompt of their own. All texts are drawn. The server is the
demo model with a context of 64k tokens and a tier on disk; its engine is killed with SIGKILL at a third of the turns,
the whole server at two thirds. A turn may compute its new tokens and two pages. One line for each turn that computes
more, then one line of JSON. A turn asks for one token, so its seconds are those to the first token.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tokenmill.demo import demo_model_path

PAGE_SIZE = 16
CONTEXT = 65536
WORDS = ("the", "file", "line", "test", "read", "write", "path", "open", "run", "call", "value", "name", "list", "type")
HEADER = "x-anthropic-billing-header: cc_version=2.1.36.{:03x}; cc_entrypoint=cli; cch={:05x};"
Body = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """The sizes of a session, texts in words: a word is about two tokens of the demo model."""

    tools: int = 40
    tool_words: int = 80
    system_words: int = 6_000
    turns: int = 40
    result_words: int = 125
    agents: int = 3
    agent_turns: int = 5


@dataclass(frozen=True)
class Turn:
    """One call: of the main agent, 0, or of a sub-agent; `number` counts each agent's own."""

    agent: int
    number: int
    body: Body


@dataclass(frozen=True)
class Cost:
    """The prompt tokens of a turn: all, those that no earlier turn had, and those that were computed; its seconds."""

    turn: Turn
    total: int
    new: int
    computed: int
    seconds: float

    @property
    def excess(self) -> int:
        """Computed tokens beside the new ones."""
        return self.computed - self.new


def session(shape: Shape, rng: random.Random, header_changes: bool = True) -> Iterator[Turn]:
    """Draw the calls of a session, in order."""
    tools = [_tool(rng, f"tool_{number}", shape.tool_words) for number in range(shape.tools)]
    main = _Agent(rng, 0, tools, _text(rng, shape.system_words), shape.result_words)
    sub_system = _text(rng, shape.system_words // 4)
    for number in range(shape.turns):
        yield main.turn(header_changes)
        for agent in range(1, shape.agents + 1):
            if number == agent * shape.turns // (shape.agents + 1):
                sub = _Agent(rng, agent, tools[: len(tools) // 2], sub_system, shape.result_words)
                for _ in range(shape.agent_turns):
                    yield sub.turn(header_changes)


def play(turns: Iterable[Turn], post: Callable[[str, Body], Body], after: Callable[[Cost], None]) -> list[Cost]:
    """Make the calls and return what each costs; `after` is called behind each, and may break things.

    `post` sends a body to a path of Anthropic's API and returns the reply.
    """
    costs: list[Cost] = []
    totals: dict[int, int] = {}
    for turn in turns:
        began = time.monotonic()
        usage = post("/v1/messages", turn.body)["usage"]
        seconds = time.monotonic() - began
        # vLLM counts whole pages that it computes apart, as Anthropic's servers do.
        computed = usage["input_tokens"] + usage.get("cache_creation_input_tokens", 0)
        total = computed + usage["cache_read_input_tokens"]
        known = totals.get(turn.agent, 0)
        if not known and turn.agent > 1:
            # Sub-agents share tools and system prompt with the first.
            stable = {name: turn.body[name] for name in ("model", "system", "tools")}
            begun = stable | {"messages": [{"role": "user", "content": "."}]}
            known = post("/v1/messages/count_tokens", begun)["input_tokens"]
        totals[turn.agent] = total
        costs.append(Cost(turn, total, total - known, computed, seconds))
        after(costs[-1])
    return costs


def too_much(costs: Iterable[Cost], page_size: int = PAGE_SIZE) -> list[Cost]:
    """Return the turns that compute more than their new tokens and two pages."""
    return [cost for cost in costs if cost.excess > 2 * page_size]


class _Agent:
    """One conversation of a session."""

    def __init__(self, rng: random.Random, agent: int, tools: list[Body], system: str, result_words: int) -> None:
        self._rng = rng
        self._agent = agent
        self._tools = tools
        self._system = system
        self._result_words = result_words
        self._messages: list[Body] = [{"role": "user", "content": _text(rng, 60)}]
        self._number = 0

    def turn(self, header_changes: bool) -> Turn:
        """Return the next call, behind the call of a tool and its result."""
        if self._number:
            self._add_call()
        rng = self._rng
        drawn = rng.randrange(1 << 12), rng.randrange(1 << 20)
        header = HEADER.format(*(drawn if header_changes else (0, 0)))
        marked = {"type": "text", "text": self._system, "cache_control": {"type": "ephemeral"}}
        body = {
            "model": "demo",
            "max_tokens": 1,
            "system": [{"type": "text", "text": header}, marked],
            "tools": self._tools,
            "messages": list(self._messages),
            "metadata": {"user_id": "session_1"},
        }
        self._number += 1
        return Turn(self._agent, self._number - 1, body)

    def _add_call(self) -> None:
        rng, call_id = self._rng, f"toolu_{self._agent}_{self._number}"
        use = {"type": "tool_use", "id": call_id, "name": rng.choice(self._tools)["name"]}
        result = {"type": "tool_result", "tool_use_id": call_id, "content": _text(rng, self._result_words)}
        text = {"type": "text", "text": _text(rng, 12)}
        self._messages += [
            {"role": "assistant", "content": [text, use | {"input": {"path": _text(rng, 3)}}]},
            {"role": "user", "content": [result]},
        ]


def _tool(rng: random.Random, name: str, words: int) -> Body:
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    return {"name": name, "description": _text(rng, words), "input_schema": schema}


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(WORDS, k=words))


# --- the server that is measured -------------------------------------------------------------------------------------


def main() -> int:
    """Play one session and print what it costs; 1 if a turn computes too much."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=20_000, help="of tools and system prompt, about")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--volatile-blocks", default="move", choices=("move", "keep"))
    parser.add_argument("--header", default="changes", choices=("changes", "stays"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="of a server with Anthropic's API, such as llama.cpp's; default: start ours")
    options = parser.parse_args()
    shape = Shape(
        tool_words=options.tokens // 250,
        system_words=options.tokens * 3 // 10,
        turns=options.turns,
        agents=options.agents,
    )
    turns = list(session(shape, random.Random(options.seed), options.header == "changes"))
    began = time.monotonic()
    if options.url:
        costs = play(turns, Connection(options.url).post, lambda cost: None)
    else:
        breaks = {len(turns) // 3: "engine", 2 * len(turns) // 3: "server"}
        with tempfile.TemporaryDirectory() as folder, Server(Path(folder), options.volatile_blocks) as server:
            began = time.monotonic()
            costs = play(turns, server.post, lambda cost: server.break_at(breaks.pop(len(server.served), "")))
    seconds = time.monotonic() - began
    over = too_much(costs)
    for cost in over:
        print(
            f"agent {cost.turn.agent}, turn {cost.turn.number}: {cost.computed} of {cost.total} tokens, {cost.new} new"
        )
    first = costs[0]
    report = {
        "server": options.url or f"tokenmill, --volatile-blocks {options.volatile_blocks}",
        "turns": len(costs),
        "first_prompt": first.total,
        "last_prompt": max(cost.total for cost in costs),
        "prompt_tokens": sum(cost.total for cost in costs),
        "new_tokens": sum(cost.new for cost in costs),
        "computed_tokens": sum(cost.computed for cost in costs),
        "largest_excess": max(cost.excess for cost in costs),
        "turns_that_compute_too_much": len(over),
        "first_turn_seconds": round(first.seconds, 2),
        "median_turn_seconds": round(statistics.median(cost.seconds for cost in costs[1:]), 2),
        "seconds": round(seconds, 1),
        "model": "served there" if options.url else "demo, 5.8M, 64k context",
    }
    print(json.dumps(report))
    return 1 if over else 0


class Connection:
    """A server that runs already."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._http = httpx.Client(timeout=600)

    def post(self, path: str, body: Body) -> Body:
        """Return a reply."""
        reply = self._http.post(f"{self._url}{path}", json=body)
        reply.raise_for_status()
        found: Body = reply.json()
        return found


class Server:
    """`tokenmill serve` with a tier on disk, which loses its engine, or all of its processes, when it is told to."""

    def __init__(self, folder: Path, volatile_blocks: str) -> None:
        self._folder = folder
        self._flags = ["--volatile-blocks", volatile_blocks]
        self._model = _long_demo(folder / "demo")
        self._http = httpx.Client(timeout=600)
        self.served: list[str] = []

    def __enter__(self) -> Server:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def post(self, path: str, body: Body) -> Body:
        """Return a reply."""
        reply = self._http.post(f"{self._url}{path}", json=body)
        reply.raise_for_status()
        if path == "/v1/messages":
            self.served.append(path)
        found: Body = reply.json()
        return found

    def break_at(self, what: str) -> None:
        """Kill the engine or all processes, once all pages are stored, and wait until it serves again."""
        if not what:
            return
        self._wait_until_stored()
        pids = _processes_below(self._process.pid)
        if what == "engine":
            (engine,) = (pid for pid, command in pids.items() if "engine_process" in command)
            os.kill(engine, signal.SIGKILL)
            time.sleep(1)
            self._wait_until_healthy()
            return
        for pid in (self._process.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._start()

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        own = ["--port", str(port), "--served-model-name", "demo", "--max-model-len", str(CONTEXT), "--page-size"]
        disk = [str(PAGE_SIZE), "--kv-disk", str(self._folder / "kv"), "--kv-disk-size", "4g", "--dtype", "bfloat16"]
        memory = ["--kv-cache-memory-bytes", "1g", "--max-num-seqs", "8"]
        command = [sys.executable, "-m", "tokenmill", "serve", str(self._model), *own, *disk, *memory, *self._flags]
        with (self._folder / "log").open("a") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._wait_until_healthy()

    def _wait_until_healthy(self) -> None:
        for _ in range(600):
            try:
                if self._http.get(f"{self._url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self._process.poll() is not None:
                break
            time.sleep(0.2)
        raise SystemExit((self._folder / "log").read_text())

    def _wait_until_stored(self) -> None:
        """Return when nothing more has been stored for two seconds."""
        last, since = -1.0, time.monotonic()
        while time.monotonic() - since < 2:
            lines = self._http.get(f"{self._url}/metrics").text.splitlines()
            stored = sum(
                float(line.split()[-1]) for line in lines if line.startswith("tokenmill:kv_stored_tokens_total")
            )
            if stored != last:
                last, since = stored, time.monotonic()
            time.sleep(0.1)


def _long_demo(folder: Path) -> Path:
    """Return the demo model with a longer context: what it says does not matter here."""
    folder.mkdir()
    for path in demo_model_path().iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path)
    config = json.loads((demo_model_path() / "config.json").read_text()) | {"max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _processes_below(parent: int) -> dict[int, str]:
    """Return the command lines of a process's children and of theirs."""
    found: dict[int, str] = {}
    parents: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            above = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        parents.setdefault(above, []).append(int(folder.name))
    left = list(parents.get(parent, ()))
    while left:
        pid = left.pop()
        found[pid] = Path(f"/proc/{pid}/cmdline").read_text()
        left += parents.get(pid, ())
    return found


if __name__ == "__main__":
    sys.exit(main())
