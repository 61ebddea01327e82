"""The server starts on a GPU machine that has its image's packages and the wheels that are carried there, no more.

`requirements/gpu-carry.txt` lists the wheels. All other packages that are installed here, and the native kernels, are
hidden from the server and from all processes that it starts.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tools.gpu.model_checks import serving

from tests.house.test_requirements import pins

ROOT = Path(__file__).parents[3]
# Of the packages that are installed here those that the image has, as read on such a machine on 17 November 2026.
IMAGE = (
    "annotated-doc anyio certifi click filelock fsspec h11 hf-xet httpcore httpx huggingface-hub idna jinja2 "
    "markdown-it-py markupsafe mdurl numpy packaging pillow prometheus-client psutil pygments pyyaml regex rich "
    "safetensors setuptools shellingham sympy tiktoken tokenizers torch tqdm transformers triton typer "
    "typing-extensions uvloop"
)
HIDES = """
import importlib.metadata, os, re, sys

there = set(os.environ["TOKENMILL_TEST_THERE"].split())
packages = importlib.metadata.packages_distributions().items()
hidden = {
    module
    for module, owners in packages
    if there.isdisjoint(re.sub("[-_.]+", "-", owner).lower() for owner in owners) and module != "tokenmill"
}


class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden or name == "tokenmill._native":
            raise ModuleNotFoundError(f"No module named {name!r}: hidden", name=name)


sys.meta_path.insert(0, Hidden())
"""


def test_a_server_answers_with_what_is_there_and_what_is_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDES)
    monkeypatch.setenv("TOKENMILL_TEST_THERE", " ".join([IMAGE, *pins("gpu-carry.txt")]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT / "src")]))
    with serving(tmp_path, "--device", "cpu", "--num-pages", "64") as ask:
        body = {"model": "tokenmill-demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3}
        assert ask("/v1/chat/completions", body)["usage"]["completion_tokens"]
        assert len(ask("/v1/embeddings", {"model": "tokenmill-demo", "input": ["one", "two"]})["data"]) == 2
