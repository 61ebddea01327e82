"""Ten models of a gigabyte in the memory of three: random requests, conversations, and kills among them.

    python -m tests.serving.models.ten_models [--models 10] [--megabytes 1000] [--models-memory 4GiB] [--requests 10000]
        [--minutes 40] [--clients 48] [--folder DIR]

Each model first answers alone: that is what every later answer is compared with. Then clients ask random models for
completions of mixed lengths, whole, as streams, or leaving early, and go on with conversations, one of each model, of
which all but the last page has to be found again, in memory or on the disk, unless its model was killed since its last
turn. Last, requests come one at a time. Shows how far it is and what is wrong on stderr, and prints what came out, one
line of JSON; ends with code 1 if an answer differs, a request fails but for a kill, or a token of a conversation was
computed twice. `--folder` keeps the models.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from benchmarks.models import make_model, samples

from tests.seeding import root_seed
from tests.serving.models.many_models import ManyModels, many_models
from tests.serving.models.test_random_requests import Kills, body_of, leave_early, tokens_of
from tokenmill.lab.bench.progress import progress_bar

PAGE = 16
NUM_PROMPTS, LONGEST = 3, 16
NUM_TURNS, TURN_TOKENS, ANSWER_TOKENS = 24, 20, 6
SHARE_OF_TURNS, SHARE_OF_STREAMS, SHARE_OF_LEAVERS = 0.15, 0.4, 0.05
NUM_ALONE = 30
# Between two looks at how far it is: of a bar on a terminal, and of plain lines elsewhere.
BAR_SECONDS, LINE_SECONDS = 2.0, 30.0


@dataclasses.dataclass
class Conversation:
    """A conversation whose user says what was drawn before; `answers`: what the model said when it was alone."""

    model: str
    said: list[list[int]]
    answers: list[list[int]] = dataclasses.field(default_factory=list)
    turn: int = 0
    ended: float = 0.0
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def prompt(self, turn: int) -> list[int]:
        told = [[*said, *answer] for said, answer in zip(self.said[:turn], self.answers[:turn], strict=True)]
        return [*itertools.chain(*told), *self.said[turn]]


@dataclasses.dataclass
class Tally:
    """Counts, times and problems of all requests."""

    counts: Counter = dataclasses.field(default_factory=Counter)
    first_tokens: list[float] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def count(self, name: str, by: int = 1) -> None:
        with self.lock:
            self.counts[name] += by

    def check(self, is_right: bool, problem: str) -> None:
        if not is_right:
            with self.lock:
                self.problems.append(problem)
                print("WRONG:", problem, file=sys.stderr, flush=True)

    @property
    def num_sent(self) -> int:
        """Requests of all ways; a name of more than a word counts something else."""
        with self.lock:
            return sum(count for name, count in self.counts.items() if " " not in name)


class Trial:
    """Random requests at a server of many models."""

    def __init__(self, server: ManyModels, names: list[str], rng: random.Random) -> None:
        self.server, self.names, self.tally = server, names, Tally()
        draw = lambda most: [rng.randrange(10, 300) for _ in range(rng.randrange(1, most))]  # noqa: E731
        self.prompts = [draw(200) for _ in range(NUM_PROMPTS)]
        self.conversations = {name: Conversation(name, [draw(TURN_TOKENS) for _ in range(NUM_TURNS)]) for name in names}
        self.wanted: dict[tuple[str, int], list[int]] = {}
        self.kills = Kills(server, random.Random(rng.random()), names)

    def answer_alone(self, name: str) -> None:
        """Let one model answer all that it will be asked for, nobody else being served."""
        with ThreadPoolExecutor(NUM_PROMPTS) as pool:
            prompts = enumerate(self.prompts)
            asked = {number: pool.submit(self.complete, body_of(name, prompt, LONGEST)) for number, prompt in prompts}
            conversation = self.conversations[name]
            for turn in range(NUM_TURNS):
                reply = self.complete(body_of(name, conversation.prompt(turn), ANSWER_TOKENS))
                conversation.answers.append(tokens_of(reply.json()))
            for number, reply in asked.items():
                self.wanted[name, number] = tokens_of(reply.result().json())

    def complete(self, body: dict) -> httpx.Response:
        return self.server.http.post(f"{self.server.url}/v1/completions", json=body, timeout=600)

    def ask(self, rng: random.Random) -> None:
        """Send one random request, and check what comes."""
        name, way = rng.choice(self.names), rng.random()
        if way < SHARE_OF_TURNS and self.conversations[name].lock.acquire(blocking=False):
            try:
                self.take_turn(self.conversations[name])
            finally:
                self.conversations[name].lock.release()
            return
        number, length = rng.randrange(NUM_PROMPTS), rng.randrange(1, LONGEST + 1)
        body, tokens = body_of(name, self.prompts[number], length), self.wanted[name, number][:length]
        if way < SHARE_OF_TURNS + SHARE_OF_STREAMS:
            self.stream(body, tokens)
        elif way < SHARE_OF_TURNS + SHARE_OF_STREAMS + SHARE_OF_LEAVERS:
            leave_early(self.server, body)
            self.tally.count("left")
        else:
            reply = self.complete(body)
            self.tally.count("whole")
            self.tally.check(reply.status_code == 200, f"{name}: {reply.status_code} {reply.text[:300]}")
            if reply.status_code == 200:
                self.tally.check(tokens_of(reply.json()) == tokens, f"{name}: another answer than alone")

    def stream(self, body: dict, tokens: list[int]) -> None:
        began, found, first = time.monotonic(), list[int](), None
        url = f"{self.server.url}/v1/completions"
        with httpx.stream("POST", url, json=body | {"stream": True}, timeout=600) as reply:
            self.tally.check(reply.status_code == 200, f"a stream: {reply.status_code}")
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        # What has been sent cannot be asked for again.
                        self.tally.count("streams that a kill has ended")
                        self.tally.check(self.kills.has_killed_since(began), f"{body['model']}: {chunk}")
                        tokens = tokens[: len(found)]
                        break
                    first = first or time.monotonic() - began
                    found += chunk["choices"][0].get("token_ids") or []
        self.tally.count("streams")
        self.tally.check(found == tokens, f"{body['model']}: another stream than alone")
        if first is not None:
            with self.tally.lock:
                self.tally.first_tokens.append(first)

    def take_turn(self, conversation: Conversation) -> None:
        turn = conversation.turn
        reply = self.complete(body_of(conversation.model, conversation.prompt(turn), ANSWER_TOKENS))
        self.tally.count("turns")
        self.tally.check(reply.status_code == 200, f"a turn: {reply.status_code} {reply.text[:300]}")
        if reply.status_code != 200:
            return
        self.tally.check(
            tokens_of(reply.json()) == conversation.answers[turn], f"{conversation.model}: another turn than alone"
        )
        if turn and not self.kills.has_killed_since(conversation.ended, conversation.model):
            # The last token of an answer was not run, and the last of a prompt always is.
            before = len(conversation.prompt(turn - 1)) + ANSWER_TOKENS - 1
            cached = (reply.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            twice = max(0, before // PAGE * PAGE - cached)
            self.tally.count("conversation tokens computed twice", twice)
            self.tally.count("conversation tokens found again", min(cached, before))
            self.tally.check(twice == 0, f"{conversation.model}: {twice} tokens of turn {turn} were computed twice")
        conversation.turn, conversation.ended = (turn + 1) % NUM_TURNS, time.monotonic()

    def first_token_alone(self, name: str) -> tuple[str, float]:
        """Return the state in which a lone request finds its model, and the seconds to its first token."""
        state = self.server.state(name)
        before = len(self.tally.first_tokens)
        self.stream(body_of(name, self.prompts[0], 1), self.wanted[name, 0][:1])
        return state, self.tally.first_tokens[before]


def main() -> int:
    """Run the trial; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("models", 10), ("megabytes", 1000), ("requests", 10_000), ("clients", 48)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--models-memory", default="4GiB")
    parser.add_argument("--minutes", type=float, default=40.0)
    parser.add_argument("--folder")
    args = parser.parse_args()
    seed = root_seed()
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="tokenmill-ten-") as temporary:
        folder = Path(args.folder or temporary)
        names = [f"model-{number}" for number in range(args.models)]
        for number, name in enumerate(names):
            if not (folder / name).exists():
                make_model(folder / name, args.megabytes, number)
                print(name, "is made", file=sys.stderr, flush=True)
        flags = ["--models-dir", str(folder), "--weight-cache-dir", f"{temporary}/packed", "--models-wait", "600"]
        with many_models(*flags, "--models-memory", args.models_memory) as server:
            trial = Trial(server, names, rng)
            for name in names:
                trial.answer_alone(name)
                print(name, "has answered alone", file=sys.stderr, flush=True)
        flags += ["--models-memory", args.models_memory, "--kv-disk", f"{temporary}/kv", "--kv-disk-size", "6GiB"]
        with many_models(*flags) as server:
            trial.server = trial.kills.server = server
            until = time.monotonic() + 60 * args.minutes
            with shown(trial, args.requests + NUM_ALONE, until):
                found = run(trial, args, until, rng)
            print(json.dumps({"seed": seed, **vars(args), **found}))
    return 1 if trial.tally.problems else 0


@contextlib.contextmanager
def shown(trial: Trial, total: int, until: float) -> Iterator[None]:
    """Show how far the trial is while it runs: a bar on a terminal, elsewhere a plain line every half minute."""
    is_over, began = threading.Event(), time.monotonic()

    def show() -> None:
        with progress_bar() as bar:
            task = bar.add_task("requests", total=total, rate="")
            while not is_over.wait(LINE_SECONDS if bar.disable else BAR_SECONDS):
                sent, now = trial.tally.num_sent, time.monotonic()
                left = min(until - now, (now - began) / sent * (total - sent)) if sent else until - now
                state = state_of(trial, max(0.0, left))
                bar.update(task, completed=sent, rate=state)
                if bar.disable:
                    print(f"{sent:,} of {total:,} requests sent, {state}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, name="progress")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def state_of(trial: Trial, left: float) -> str:
    """Say what has happened until now, and that there are `left` seconds to go."""
    try:
        loads = f"{sum(samples(trial.server.get('/metrics').text, 'model_loads_total')):.0f}"
    except httpx.HTTPError:
        loads = "?"
    happened = f"{len(trial.tally.problems)} problems, {loads} loads, {trial.kills.num_kills} kills"
    return f"{happened}, {left / 60:.0f} minutes left"


def run(trial: Trial, args: argparse.Namespace, until: float, rng: random.Random) -> dict:
    """Send the requests until that moment; return what came out."""
    seeds = iter([rng.random() for _ in range(args.requests)])
    guard, began = threading.Lock(), time.monotonic()

    def client() -> None:
        while time.monotonic() < until:
            with guard:
                drawn = next(seeds, None)
            if drawn is None:
                return
            trial.ask(random.Random(drawn))

    with ThreadPoolExecutor(args.clients + 1) as pool:
        killer = pool.submit(trial.kills.run)
        try:
            for one in [pool.submit(client) for _ in range(args.clients)]:
                one.result()
        finally:
            trial.kills.is_over = True
        killer.result()
    seconds, crowded = time.monotonic() - began, list(trial.tally.first_tokens)
    alone: dict[str, list[float]] = {}
    for _ in range(NUM_ALONE):
        state, first = trial.first_token_alone(rng.choice(trial.names))
        alone.setdefault(state, []).append(first)
    text = trial.server.get("/metrics").text
    return {
        **trial.tally.counts,
        "sent": trial.tally.num_sent,
        "seconds": round(seconds),
        "problems": len(trial.tally.problems),
        "kills": trial.kills.num_kills,
        "loads": sum(samples(text, "model_loads_total")),
        "wakes": sum(samples(text, "model_wakes_total")),
        "first token among others, median": round(statistics.median(crowded), 2),
        "first token alone, median by state": {
            name: [len(found), round(statistics.median(found), 3)] for name, found in alone.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())
