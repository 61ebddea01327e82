"""Describe models that are not loaded, in a process of its own: what it imports, a server of many models need not hold.

Reads requests from standard input and writes descriptions to standard output, in JSON: `ModelQuestion`s and
`ModelDescription`s, in the same order. Only configs and headers are read.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path

import msgspec

from tokenmill.config.configs import EngineConfig
from tokenmill.config.model_files import read_json
from tokenmill.config.speculation import parse_config
from tokenmill.core.errors import InvalidConfig, TokenMillError
from tokenmill.core.model_description import ModelDescription, ModelMemory
from tokenmill.core.pooling import PoolingTask
from tokenmill.model.architecture.architecture import Architecture
from tokenmill.model.pooling.files import read_pooling
from tokenmill.model.pooling.spec import PoolingSpec
from tokenmill.model.weights.checkpoint import read_architecture, stored_format
from tokenmill.model.weights.hub import fetch
from tokenmill.platform.protocol import Platform
from tokenmill.platform.select import select_platform
from tokenmill.startup.machine.device import choose_threads
from tokenmill.startup.sizing.forms import Form, form_of
from tokenmill.startup.sizing.kv_size import bytes_of, wanted_context
from tokenmill.startup.sizing.state_size import BYTES_OF, STATES_PER_ROW, bytes_per_state

# Of what all models may take together: KV and states of one, where a config does not say how many bytes.
KV_SHARE, STATES_SHARE = 1 / 4, 1 / 8
# Measured (benchmarks/models.py): the two processes of a model take 82 MiB of their own, and 115 with what steps of a
# model of 1 GB work on.
PROCESS_BYTES = 160 << 20


class ModelQuestion(msgspec.Struct, frozen=True):
    """A model to describe.

    Attributes:
        engine: its config.
        num_engines: engines of its server, each with KV of its own.
        budget: bytes that all models may take together.
    """

    engine: EngineConfig
    num_engines: int
    budget: int


def describe(question: ModelQuestion, platform: Platform) -> ModelDescription:
    """Return the description of a model; what speaks against loading it is its `problem`."""
    try:
        return _described(question, platform)
    except TokenMillError as error:
        return ModelDescription(problem=str(error).partition("\n")[0])


def _described(question: ModelQuestion, platform: Platform) -> ModelDescription:
    config = dataclasses.replace(question.engine, device=platform.device).resolve()
    speculation = parse_config(config.speculative_config)
    if speculation is not None and speculation.loads_weights:
        raise InvalidConfig(
            f"--speculative-config: a server of several models does not count the memory of a second model "
            f"({speculation.method}); use suffix or ngram"
        )
    folder = fetch(config.model, config.revision, config.download_dir)
    architecture = read_architecture(folder)
    num_threads, _ = choose_threads(config, platform, architecture.num_parameters() * BYTES_OF[config.dtype])
    form = form_of(config, "", platform, folder, architecture, num_threads)
    template = _template(folder)
    return ModelDescription(
        memory=_memory(question, config, form, architecture),
        context=wanted_context(config, architecture.max_position),
        architecture=architecture.name,
        num_parameters=architecture.num_parameters(),
        vocab_size=architecture.vocab_size,
        stored=stored_format(folder, config.dtype, config.quantization),
        capabilities=_capabilities(form, template, read_pooling(folder, config.task)),
        template=template,
    )


def _memory(question: ModelQuestion, config: EngineConfig, form: Form, architecture: Architecture) -> ModelMemory:
    tokens = wanted_context(config, architecture.max_position)
    one = bytes_of(-(-tokens // config.page_size), form.page_bytes)
    if config.num_pages is not None:
        kv = bytes_of(config.num_pages, form.page_bytes)
    elif config.kv_cache_memory_bytes is not None:
        kv = config.kv_cache_memory_bytes
    else:
        # One request of the whole context: of one that was asked for, or of what the memory has room for.
        kv = one if config.max_model_len else min(one, int(question.budget * KV_SHARE))
    state = bytes_per_state(config, architecture)
    states = config.state_memory or min(
        STATES_PER_ROW * config.max_num_seqs * state, max(state, int(question.budget * STATES_SHARE))
    )
    return ModelMemory(
        weights=form.weight_bytes - form.tower.weights,
        tower=form.tower.weights + form.tower.reserved,
        kv=kv * question.num_engines,
        states=states * question.num_engines,
        # A state more than requests can have: for padding.
        processes=PROCESS_BYTES + state * question.num_engines,
    )


def _capabilities(form: Form, template: str, pooling: PoolingSpec | None) -> tuple[str, ...]:
    """Return what a model can do, as far as its files show it."""
    if pooling is not None:
        return ("embedding",) if pooling.task is PoolingTask.EMBED else ("classification",)
    has_tower = form.tower.weights > 0
    shown = {
        "tools": "tools" in template,
        "thinking": "enable_thinking" in template or "<think>" in template,
        "vision": has_tower and form.tower.users == "images",
        "audio": has_tower and form.tower.users != "images",
    }
    return ("completion", *(name for name, is_shown in shown.items() if is_shown))


def _template(folder: Path) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8", errors="replace")
    entry = read_json(folder, "tokenizer_config.json").get("chat_template")
    return entry if isinstance(entry, str) else ""


def main() -> int:
    """Answer the questions on standard input."""
    logging.basicConfig(level=logging.ERROR)
    questions = msgspec.json.decode(sys.stdin.buffer.read(), type=list[ModelQuestion])
    platforms: dict[str, Platform] = {}
    answers = []
    for question in questions:
        device = question.engine.device
        try:
            platform = platforms.setdefault(device, select_platform(device))
            answers.append(describe(question, platform))
        except TokenMillError as error:
            answers.append(ModelDescription(problem=str(error)))
    sys.stdout.buffer.write(msgspec.json.encode(answers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
