import io
import json
import re
import shlex
import subprocess
import sys

import msgspec
import pytest

from tokenmill.cli.startup import open_screen
from tokenmill.cli.startup_report import base_url, bytes_text, chat_command, count_text, curl_command, facts
from tokenmill.config.configs import ServerConfig
from tokenmill.core.engine_messages import EngineProgress, EngineReady

READY = EngineReady(
    model="/models/tiny[1]",
    architecture="Qwen3ForCausalLM",
    num_parameters=596_049_920,
    dtype="bfloat16",
    device="cpu",
    kernels="torch",
    kernels_reason="as a test",
    attention_backend="cpu",
    attention_reason="the only one [here]",
    max_model_len=512,
    vocab_size=331,
    page_size=16,
    num_pages=48,
    kv_bytes=3 << 30,
    weight_bytes=1_192_099_840,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    num_threads=2,
    threads_reason="all cores that this process may use",
    seconds={},
)
SERVER = ServerConfig(served_model_name=("tiny",), port=8001)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def start(stream: io.StringIO, server: ServerConfig = SERVER) -> str:
    clock = Clock()
    with open_screen(stream, server, clock) as screen:
        screen.on_progress(EngineProgress("loading the engine", 0, 0))
        clock.now += 0.11
        screen.on_progress(EngineProgress("loading weights", 0, 4 << 20))
        screen.on_progress(EngineProgress("loading weights", 4 << 20, 4 << 20))
        screen.on_line("a child says [x]")
        screen.on_progress(EngineProgress("warming up", 1, 3))
        screen.on_ready(READY)
        screen.on_error("it ended")
    return stream.getvalue()


def test_plain_start_is_lines_without_control_characters():
    lines = start(io.StringIO()).splitlines()
    assert lines[:3] == ["loading the engine ...", "loading the engine: 0.1 s", "loading weights ..."]
    assert lines.count("loading weights ...") == 1
    assert lines[-1] == "tokenmill: it ended"
    assert lines[-2].startswith("curl ")
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["plain", "terminal"])
def test_start_says_what_a_person_wants_to_know(stream):
    text = start(stream)
    assert text.count("http://127.0.0.1:8001/ ") + text.count("http://127.0.0.1:8001/\n") == 1
    for part in (
        "loading the engine",
        "loading weights",
        "a child says [x]",
        "warming up",
        "/models/tiny[1]",
        "Qwen3ForCausalLM, 596 M parameters",
        "1.11 GiB of bfloat16 on cpu",
        "cpu (the only one [here])",
        "768 tokens in 48 pages, 3 GiB",
        "room for 1.5 requests of the full 512 tokens",
        "http://127.0.0.1:8001/v1",
        curl_command("tiny", SERVER),
        "it ended",
    ):
        assert part in text


def test_terminal_start_gives_each_phase_its_own_seconds():
    stream, clock = Terminal(), Clock()
    with open_screen(stream, SERVER, clock) as screen:
        for phase, seconds in (("short", 0.11), ("long", 34.5), ("none", 0)):
            screen.on_progress(EngineProgress(phase, 0, 0))
            clock.now += seconds
        screen.on_ready(READY)
    # The last frame, without colours.
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue()).splitlines()
    last = {name: [line for line in lines if name in line][-1] for name in ("short", "long")}
    assert "0.1 s" in last["short"]
    assert "34.5 s" in last["long"]


def test_terminal_start_shows_bars_with_amounts():
    text = start(Terminal())
    assert "4 MiB of 4 MiB" in text
    assert "━" in text


def test_the_curl_command_is_one_line_and_survives_a_shell():
    words = shlex.split(curl_command('it\'s a "model"', SERVER))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8001/v1/chat/completions"]
    assert '"model": "it\'s a \\"model\\""' in words[words.index("-d") + 1]


def test_the_key_is_never_shown():
    server = ServerConfig(api_key=("secret-key",), served_model_name=("tiny",))
    text = start(io.StringIO(), server)
    assert "secret-key" not in text
    assert '"Authorization: Bearer $TOKENMILL_API_KEY"' in text


@pytest.mark.parametrize(
    ("how", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:8000"),
        ({"host": "::"}, "http://[::1]:8000"),
        ({"host": "fe80::1", "port": 9}, "http://[fe80::1]:9"),
        ({"root_path": "/llm"}, "http://127.0.0.1:8000/llm"),
        ({"ssl_certfile": "c", "ssl_keyfile": "k"}, "https://127.0.0.1:8000"),
        ({"uds": "/run/x"}, "http://localhost"),
    ],
)
def test_url_is_one_that_this_machine_can_reach(how, url):
    assert base_url(ServerConfig(**how)) == url


def test_a_unix_socket_is_named_in_the_command(monkeypatch):
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert "--unix-socket /run/x" in curl_command("tiny", ServerConfig(uds="/run/x"))
    assert chat_command(ServerConfig(uds="/run/x")) == "tokenmill chat --url unix:/run/x"
    tls = ServerConfig(ssl_certfile="a cert.pem", ssl_keyfile="k", port=8002)
    assert chat_command(tls) == "tokenmill chat --url https://127.0.0.1:8002 --cacert 'a cert.pem'"


def test_no_fact_is_told_twice():
    names = [name for name, _ in facts(READY, ServerConfig(api_key=("k",))) if name]
    assert len(set(names)) == len(names)


def test_who_sets_a_key_is_told_that_metrics_need_it():
    assert "metrics" not in dict(facts(READY, ServerConfig()))
    assert dict(facts(READY, ServerConfig(root_path="/x")))["page"] == "http://127.0.0.1:8000/x/"
    assert "--metrics-open" in dict(facts(READY, ServerConfig(api_key=("k",))))["metrics"]
    assert "open to all" in dict(facts(READY, ServerConfig(api_key=("k",), metrics_open=True)))["metrics"]


@pytest.mark.processes
def test_the_chat_command_runs_in_a_terminal_without_our_environment(monkeypatch):
    command = shlex.split(chat_command(ServerConfig()))
    assert command[-1] == "chat"
    done = subprocess.run(
        [*command, "--help"], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert chat_command(SERVER) == "tokenmill chat --url http://127.0.0.1:8001"


def test_a_server_that_is_open_to_all_says_so():
    assert "open to all" in dict(facts(READY, ServerConfig(host="0.0.0.0")))
    assert "open to all" not in dict(facts(READY, ServerConfig(host="0.0.0.0", api_key=("k",))))
    assert "open to all" not in dict(facts(READY, ServerConfig()))


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7"), (42_912, "42.9 k"), (596_049_920, "596 M"), (7_600_000_000, "7.6 B")]
)
def test_counts(count, text):
    assert count_text(count) == text


@pytest.mark.parametrize(
    ("size", "text"), [(5, "5 B"), (1536, "1.5 KiB"), (3 << 30, "3 GiB"), (5000 << 30, "5,000 GiB"), (0, "0 B")]
)
def test_byte_sizes(size, text):
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("num_pages", "text"),
    [(32, "room for 1 request of"), (47, "room for 1.4 requests of"), (32 * 1024, "room for 1,024 requests of")],
)
def test_room_is_counted_in_whole_tenths_and_never_rounded_up(num_pages, text):
    lines = [line for _, line in facts(msgspec.structs.replace(READY, num_pages=num_pages), SERVER)]
    assert any(line.startswith(text) for line in lines)


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_as_json_every_line_of_a_start_is_an_object(stream):
    server = ServerConfig(served_model_name=("tiny",), port=8001, log_format="json")
    lines = [json.loads(line) for line in start(stream(), server).splitlines()]
    assert [(line["event"], line["message"]) for line in lines if line["event"] != "ready"] == [
        ("start", "loading the engine"),
        ("start", "loading weights"),
        ("output", "a child says [x]"),
        ("start", "warming up"),
        ("error", "it ended"),
    ]
    (ready,) = (line for line in lines if line["event"] == "ready")
    assert ready["engine"]["num_pages"] == 48
    assert ready["url"] == "http://127.0.0.1:8001"


def test_as_json_an_object_of_the_server_stays_what_it_is():
    stream = io.StringIO()
    with open_screen(stream, ServerConfig(log_format="json", host="0.0.0.0")) as screen:
        screen.on_line('{"time":1.5,"event":"request","message":"x"}')
        screen.on_ready(READY)
    first, *_, last = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first == {"time": 1.5, "event": "request", "message": "x"}
    assert last["event"] == "warning", "open to all"


def test_several_engines_are_shown():
    assert "engines" not in dict(facts(READY, ServerConfig()))
    assert dict(facts(READY, ServerConfig(data_parallel_size=3)))["engines"].startswith("3, each")


def test_the_parsers_of_chat_answers_are_shown():
    chat = [("tools", "hermes (the template writes [it]); auto tool choice is on")]
    assert dict(facts(READY, SERVER, chat))["tools"] == chat[0][1]
    for stream in (io.StringIO(), Terminal()):
        with open_screen(stream, SERVER, Clock()) as screen:
            screen.on_ready(READY, chat)
        assert "the template writes [it]" in stream.getvalue()
    stream = io.StringIO()
    with open_screen(stream, ServerConfig(log_format="json")) as screen:
        screen.on_ready(READY, chat)
    assert json.loads(stream.getvalue().splitlines()[0])["chat"] == dict(chat)
