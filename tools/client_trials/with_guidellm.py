"""guidellm: a benchmark of a few requests."""

import os

from commands import output
from report import MODEL, URL, call, scratch

folder = scratch()
TOKENIZER = os.environ["TOKENMILL_MODEL_FOLDER"]


def benchmark(profile: str) -> object:
    """The size of the report that it writes."""
    output(
        "guidellm", "run", "--disable-console", "--profile", profile,
        "--backend", f"kind=openai_http,target={URL},model={MODEL}",
        "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=16",
        "--constraint", "kind=max_requests,count=4",
        "--output", f"kind=json,path={folder}/report.json",
        HF_HUB_OFFLINE="1",
    )  # fmt: skip
    return (folder / "report.json").stat().st_size


@call("benchmark, one after another")
def _() -> object:
    return benchmark("kind=synchronous")


@call("benchmark, four at once")
def _() -> object:
    return benchmark("kind=concurrent,streams=4")
