"""The text that a decoder gets for a query and a document: {query}, {document} and {instruction} stand in it.

A decoder that scores was trained on one such text, and gives random scores without it.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidConfig
from tokenmill.model.pooling.spec import PoolingSpec, RowScoreSpec, TokenScoreSpec

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PLACE = re.compile(r"\{(query|document|instruction)\}")
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
# A chat template of this name is one for pairs; llama.cpp's converter writes it.
NAME = "rerank"


def find_template(spec: PoolingSpec, tokenizer: Path) -> str:
    """Return the template that a tokenizer's files have, or the known one of models that answer yes or no; "": none."""
    entry = read_json(tokenizer, "tokenizer_config.json").get("chat_template")
    for one in entry if isinstance(entry, list) else ():
        if isinstance(one, dict) and one.get("name") == NAME and _is_template(one.get("template")):
            return str(one["template"])
    return QWEN3 if any(isinstance(step, TokenScoreSpec | RowScoreSpec) for step in spec.steps) else ""


def _is_template(text: object) -> bool:
    return isinstance(text, str) and "{query}" in text and "{document}" in text


def check_template(text: str) -> None:
    """Check that a template has a place for the query and one for the document.

    Raises:
        InvalidConfig: it has not.
    """
    if not _is_template(text):
        raise InvalidConfig("--rerank-template: {query} and {document} must stand in it")


def fill_template(template: str, query: str, document: str, instruction: str) -> str:
    """Return the text for a pair; braces in what is put in stay as they are."""
    values = {"query": query, "document": document, "instruction": instruction}
    return PLACE.sub(lambda found: values[found[1]], template)
