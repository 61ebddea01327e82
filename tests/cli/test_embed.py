import json

import numpy as np
import pytest

from tests.embedders import Modules, States, make_embedder, unit
from tests.seeding import seed_for
from tokenmill.cli.main import main

SEED = seed_for(__name__)
LINES = [
    {"text": "the mill", "id": "one"},
    {"input": [5, 6, 7]},
    {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "hello", "model": "x"}},
    {"text": "x", "input": "y"},
    "not json",
    {"prompt": "x " * 600},
    {"prompt": "the mill"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_embedder(tmp_path_factory.mktemp("models") / "e", Modules(prompts={"query": "find: "}), seed=SEED)


@pytest.fixture
def files(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in LINES))
    return source, tmp_path / "out.jsonl"


def embed(files, model, *arguments: str) -> int:
    sizes = ["--num-pages", "64", "--max-num-seqs", "4", "--dtype", "float32"]
    return main(["embed", "-i", str(files[0]), "-o", str(files[1]), "--model", str(model), *sizes, *arguments])


def answers(files) -> list[dict]:
    return [json.loads(line) for line in files[1].read_text().splitlines()]


def test_every_line_has_its_vector_or_its_error(files, model, capsys):
    assert embed(files, model) == 1
    assert "7 lines, 3 of them errors" in capsys.readouterr().err
    found, states = answers(files), States(model)
    assert [line["line"] for line in found] == list(range(1, 8))
    for line, text in ((found[0], "the mill"), (found[1], [5, 6, 7]), (found[6], "the mill")):
        np.testing.assert_allclose(line["embedding"], unit(states(text)[-1]), atol=2e-5)
    assert found[0]["id"] == "one" and found[1]["usage"]["total_tokens"] == 3
    body = found[2]["response"]["body"]
    np.testing.assert_allclose(body["data"][0]["embedding"], unit(states("hello")[-1]), atol=2e-5)
    assert found[2]["custom_id"] == "a" and body["usage"]["prompt_tokens"] == len(states("hello"))
    for line, part in ((found[3], "one text"), (found[4], "JSON"), (found[5], "length is 512")):
        assert part in line["error"]["message"]


def test_an_interrupted_run_goes_on(files, model, capsys):
    embed(files, model, "--prompt-name", "query", "--raw")
    whole = files[1].read_text()
    want = States(model)("find: the mill")[-1]
    np.testing.assert_allclose(answers(files)[0]["embedding"], want, atol=2e-4)
    lines = whole.splitlines(keepends=True)
    files[1].write_text("".join([lines[4], lines[0], lines[2][:20]]))
    embed(files, model, "--prompt-name", "query", "--raw")
    assert files[1].read_text() == whole
