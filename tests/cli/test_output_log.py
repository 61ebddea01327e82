import contextlib
import os
import random
import subprocess
import sys

import pytest

from tests.full_disk import contents, room_for
from tokenmill.cli.output_log import OutputLog
from tokenmill.core.errors import InvalidConfig, TokenMillError


def line(number: int) -> dict[str, object]:
    return {"line": number, "input": f"d{number}", "text": "a\u2028b\n"}


def numbers(path) -> list[int]:
    import json

    return [json.loads(raw)["line"] for raw in path.read_bytes().split(b"\n")[:-1]]


def test_a_run_cut_at_any_byte_goes_on_without_losing_or_repeating_a_line(tmp_path):
    path = tmp_path / "out.jsonl"
    seed = random.randrange(2**32)
    order = list(range(1, 9))
    random.Random(seed).shuffle(order)
    with OutputLog(path) as log:
        for number in order:
            log.append(line(number))
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        with OutputLog(path) as log:
            assert sorted(log.done) == sorted(order[: whole[:cut].count(b"\n")]), f"seed {seed}, cut {cut}"
            for number in order:
                if number not in log.done:
                    log.append(line(number))
            log.sort()
        assert numbers(path) == sorted(order), f"seed {seed}, cut {cut}"


def test_at_any_byte_a_full_disk_leaves_whole_lines_and_the_run_goes_on_later(tmp_path):
    path = tmp_path / "out.jsonl"
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    order = list(range(1, 9))
    rng.shuffle(order)
    for _ in range(30):
        path.unlink(missing_ok=True)
        with OutputLog(path) as log:
            for number in order:
                size = path.stat().st_size
                with (
                    room_for(size + rng.randrange(20)),
                    pytest.raises(TokenMillError, match="run the same command again"),
                ):
                    log.append(line(number))
                assert path.stat().st_size == size, f"seed {seed}"
                assert number not in log.done
                log.append(line(number))
            whole = contents(tmp_path)
            with room_for(rng.randrange(len(whole["out.jsonl"]))), contextlib.suppress(TokenMillError):
                log.sort()
                assert order == sorted(order)
            assert contents(tmp_path) == whole
            log.sort()
        assert numbers(path) == sorted(order), f"seed {seed}"


def test_lines_are_on_disk_before_the_run_ends(tmp_path):
    path = tmp_path / "out.jsonl"
    code = (
        "import os, pathlib, sys\nfrom tokenmill.cli.output_log import OutputLog\n"
        "log = OutputLog(pathlib.Path(sys.argv[1]))\n"
        "log.append({'line': 1, 'input': 'x'})\nos.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    with OutputLog(path) as log:
        assert log.done == {1: "x"}


def test_a_second_run_on_the_same_file_is_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    with OutputLog(path), pytest.raises(InvalidConfig, match="another run"):
        OutputLog(path)


@pytest.mark.parametrize(
    "content",
    [b"my notes", b"my notes\n", b'{"a": 1}\n', b'{"line":1,"input":"x"}\nmore', b'{"line":1,"input":"x"}\n' * 2],
)
def test_a_file_that_holds_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(InvalidConfig, match="--overwrite"):
        OutputLog(path)
    assert path.read_bytes() == content


def test_overwrite_starts_afresh(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b"my notes")
    with OutputLog(path, overwrite=True) as log:
        log.append(line(1))
    assert numbers(path) == [1]


def test_a_folder_that_does_not_exist_is_one_sentence(tmp_path):
    with pytest.raises(InvalidConfig, match="No such file or directory"):
        OutputLog(tmp_path / "none" / "out.jsonl")
    assert os.listdir(tmp_path) == []
