"""lm-eval, over completions and over chat, on tasks of its own: the usual ones come from the hub."""

import json
import os

from commands import output
from report import BASE, MODEL, call, scratch

folder = scratch()
LINES = [
    {"question": "A page is", "choices": [" shared", " blue"], "answer": 0},
    {"question": "TokenMill is", "choices": [" an", " xx"], "answer": 0},
]
(folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
COMMON = f"""dataset_path: json
dataset_kwargs: {{data_files: {folder}/data.jsonl}}
test_split: train
doc_to_text: "{{{{question}}}}"
"""
(folder / "mill_choice.yaml").write_text(
    f"task: mill_choice\n{COMMON}output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n"
    "metric_list: [{metric: acc}]\n"
)
(folder / "mill_text.yaml").write_text(
    f'task: mill_text\n{COMMON}output_type: generate_until\ndoc_to_target: "{{{{choices[0]}}}}"\n'
    'generation_kwargs: {until: ["."], max_gen_toks: 16}\nmetric_list: [{metric: exact_match}]\n'
)


def evaluate(model: str, path: str, task: str, *more: str, settings: str = "") -> object:
    """Return True if lm-eval ends with a table of results."""
    arguments = f"model={MODEL},base_url={BASE}{path},num_concurrent=2{settings}"
    where = ("--include_path", str(folder), "--tasks", task)
    said = output("lm_eval", "--model", model, "--model_args", arguments, *where, *more, HF_HUB_OFFLINE="1")
    return "|mill_" in said


TOKENIZER = f",tokenizer_backend=huggingface,tokenizer={os.environ['TOKENMILL_MODEL_FOLDER']}"


@call("completions, likelihood of choices")
def _() -> object:
    return evaluate("local-completions", "/completions", "mill_choice", settings=TOKENIZER)


@call("completions, text")
def _() -> object:
    return evaluate("local-completions", "/completions", "mill_text", settings=TOKENIZER)


@call("completions, remote tokenizer")
def _() -> object:
    return evaluate("local-completions", "/completions", "mill_choice", settings=",tokenizer_backend=remote")


@call("chat completions, text")
def _() -> object:
    return evaluate("local-chat-completions", "/chat/completions", "mill_text", "--apply_chat_template")
