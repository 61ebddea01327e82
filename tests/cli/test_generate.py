import json
import random

import pytest

from tokenmill.cli.main import main
from tokenmill.core.errors import InvalidRequest

CHAT = [{"role": "user", "content": "hello world"}]
LINES = [
    {"prompt": "the mill", "max_tokens": 4, "temperature": 0},
    {"messages": CHAT, "max_tokens": 3, "n": 2, "temperature": 1, "seed": 5, "id": "two"},
    "this is not json",
    {"prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0, "logprobs": 1},
    {"prompt": "x", "max_tokns": 2},
    {"prompt": [99999]},
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT, "max_tokens": 3}},
    {"custom_id": "b", "body": {"prompt": "x", "temperature": 9}},
    {"prompt": "x " * 600},
]


@pytest.fixture
def files(tmp_path):
    """An input file with a blank line in it, and a path for the output."""
    source = tmp_path / "in.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in LINES]
    source.write_text("\n".join([*texts[:2], "", *texts[2:]]) + "\n")
    return source, tmp_path / "out.jsonl"


def generate(files, model, *arguments: str) -> int:
    source, output = files
    flags = ["--num-pages", "96", "--max-num-seqs", "4", "--seed", "1"]
    return main(["generate", "-i", str(source), "-o", str(output), "--model", str(model), *flags, *arguments])


def answers(files) -> dict[int, dict]:
    return {line["line"]: line for line in map(json.loads, files[1].read_text().splitlines())}


def test_every_line_is_answered_once_and_a_bad_one_fails_alone(files, tiny_model, capsys):
    assert generate(files, tiny_model) == 1, "some lines became errors"
    assert "out.jsonl: 9 lines, 5 of them errors" in capsys.readouterr().err
    found = answers(files)
    assert list(found) == [1, 2, 4, 5, 6, 7, 8, 9, 10]
    assert found[1]["usage"]["completion_tokens"] == 4
    assert [choice["index"] for choice in found[2]["choices"]] == [0, 1]
    assert (found[2]["id"], found[2]["choices"][0]["finish_reason"]) == ("two", "length")
    assert len(found[5]["choices"][0]["logprobs"]) == len(found[5]["choices"][0]["token_ids"]) == 2
    for line, part in ((4, "JSON"), (6, "max_tokns"), (7, "99999"), (10, "tokens")):
        assert part in found[line]["error"]["message"]
    batch = found[8]["response"]
    assert (found[8]["custom_id"], batch["status_code"], batch["body"]["object"]) == ("a", 200, "chat.completion")
    assert batch["body"]["usage"]["completion_tokens"] == 3
    assert batch["body"]["model"] == tiny_model.name
    assert found[9]["response"]["status_code"] == 400
    assert "temperature" in found[9]["response"]["body"]["error"]["message"]


def test_an_interrupted_run_goes_on_to_the_same_end(files, tiny_model, capsys):
    source, output = files
    # Greedy, so that a line that is done again comes out the same.
    source.write_text("".join(json.dumps({"prompt": f"mill {i}", "max_tokens": 3}) + "\n" for i in range(6)))
    greedy = ("--temperature", "0")
    assert generate(files, tiny_model, *greedy) == 0
    whole = output.read_bytes()
    seed = random.randrange(2**32)
    cut = random.Random(seed).randrange(1, len(whole))
    output.write_bytes(whole[:cut])
    assert generate(files, tiny_model, *greedy) == 0
    again = output.read_bytes()
    assert without_cached(again) == without_cached(whole), f"seed {seed}: cut at {cut}"
    assert again.startswith(whole[: whole[:cut].rfind(b"\n") + 1]), "what was whole is kept as it was"


def without_cached(raw: bytes) -> list[dict]:
    lines = [json.loads(line) for line in raw.splitlines()]
    for line in lines:
        # How much the prefix cache supplied depends on what ran before.
        line["usage"].pop("prompt_tokens_details")
    return lines


def test_a_finished_run_needs_no_model(files, tiny_model, capsys):
    assert generate(files, tiny_model) == 1
    before = files[1].read_bytes()
    assert generate(files, "/no/such/model") == 1, "its errors still count"
    assert files[1].read_bytes() == before


def test_another_input_is_noticed(files, tiny_model, capsys):
    source, _ = files
    source.write_text('{"prompt": "a", "max_tokens": 1}\n')
    assert generate(files, tiny_model) == 0
    source.write_text('{"prompt": "b", "max_tokens": 1}\n')
    assert generate(files, tiny_model) == 2
    assert "line 1 of" in capsys.readouterr().err
    source.write_text("")
    assert generate(files, tiny_model) == 2
    assert "does not have" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_done(files, tiny_model, monkeypatch, capsys):
    from tokenmill.llm.llm import LLM

    steps = iter(range(3))
    step = LLM.step

    def interrupted(self):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step(self)

    source, _ = files
    source.write_text("".join(f'{{"prompt": "a", "max_tokens": {n}}}\n' for n in (1, 50)))
    with monkeypatch.context() as patch:
        patch.setattr(LLM, "step", interrupted)
        assert generate(files, tiny_model) == 130
    assert "run the same command again" in capsys.readouterr().err
    assert list(answers(files)) == [1]
    assert generate(files, tiny_model) == 0
    assert list(answers(files)) == [1, 2]


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b"[]", "object"),
        (b"\xff\xfe", "JSON"),
        (b'{"prompt": "a", "messages": []}', "either prompt or messages"),
        (b"{}", "either prompt or messages"),
        (b'{"prompt": ""}', "empty"),
        (b'{"prompt": "a", "stream": true}', "stream"),
        (b'{"prompt": "a", "suffix": "b"}', "suffix"),
        (b'{"prompt": "a", "n": true}', "int"),
        (b'{"prompt": "a", "temperature": 1e999}', ""),
        (b'{"custom_id": "a", "body": {"prompt": "a", "logprobs": 1}}', "logprobs"),
        (b'{"custom_id": "a", "body": null}', "null"),
        (b'{"prompt": ' + b"[" * 100000, ""),
    ],
)
def test_what_is_no_job_is_refused(raw, part):
    from tokenmill.cli.batch_io import read_job, refused_line

    with pytest.raises(InvalidRequest) as error:
        read_job(1, raw, {})
    assert part in str(error.value)
    assert refused_line(1, raw, "why")["line"] == 1


def test_a_line_overrides_the_defaults():
    from tokenmill.cli.batch_io import read_job

    job = read_job(3, b'{"prompt": "a", "temperature": 0, "stop": "x"}', {"temperature": 0.7, "top_k": 5})
    assert (job.params.temperature, job.params.top_k, job.params.stop) == (0, 5, ("x",))


@pytest.mark.parametrize("wrong", [["--input-len", "5:2"], ["--output-len", "x"], ["--repeats", "0"]])
def test_bench_refuses_what_it_cannot_measure(wrong, capsys):
    assert main(["bench", "throughput", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err
