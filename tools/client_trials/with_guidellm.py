"""guidellm: a benchmark of a few requests."""

import os

from commands import output
from report import MODEL, URL, call, scratch

folder = scratch()
TOKENIZER = os.environ["TOKENMILL_MODEL_FOLDER"]


def benchmark(*how: str) -> object:
    """Whether it writes its report."""
    output(
        "guidellm", "benchmark", "run", "--target", URL, "--model", MODEL, "--processor", TOKENIZER,
        "--data", "prompt_tokens=32,output_tokens=16", "--max-requests", "4", "--outputs", "json",
        "--output-path", str(folder / "report.json"), *how, HF_HUB_OFFLINE="1", COLUMNS="120",
    )  # fmt: skip
    return (folder / "report.json").stat().st_size


@call("benchmark, one after another")
def _() -> object:
    return benchmark("--profile", "synchronous")


@call("benchmark, four at once")
def _() -> object:
    return benchmark("--profile", "concurrent", "--rate", "4")
