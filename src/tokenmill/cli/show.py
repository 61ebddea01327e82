"""`tokenmill show MODEL`: what a model is, from its small files and headers: nothing is loaded, no weights fetched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.cli.pull import add_cache_flag
from tokenmill.cli.servers import check_model_is_there
from tokenmill.config.configs import EngineConfig
from tokenmill.config.model_files import default_sampling
from tokenmill.config.parser import Parser
from tokenmill.core.sizes import size_text

if TYPE_CHECKING:
    from tokenmill.model.architecture.architecture import Architecture
    from tokenmill.startup.sizing.forms import Form

Line = tuple[str, str]


def run(arguments: Sequence[str]) -> int:
    """Print a line for each property; returns 0.

    Raises:
        TokenMillError: there is no such model, or it is of a kind that is not supported.
    """
    namespace = make_parser().parse(arguments)
    config = EngineConfig(model=namespace.model, revision=namespace.revision, download_dir=namespace.download_dir)
    check_model_is_there(config.model)
    for label, text in properties(config):
        print(f"{label:<12} {text}")
    return 0


def make_parser() -> Parser:
    """Return the parser of `show`."""
    parser = Parser(
        "show", "Show what a model is: family, size, context, formats, what its template can do.", "[MODEL]"
    )
    parser.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="folder, .gguf file or hub id (default: the demo model)"
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit (default: the main branch)")
    add_cache_flag(parser)
    return parser


def properties(config: EngineConfig) -> list[Line]:
    """Return label and text of each property of a config's model.

    Raises:
        InvalidCheckpoint, InvalidConfig: as `estimate`.
    """
    from tokenmill.demo import demo_model_path
    from tokenmill.model.weights.checkpoint import read_architecture
    from tokenmill.platform.select import select_platform
    from tokenmill.startup.machine.device import choose_threads
    from tokenmill.startup.sizing.estimate import opened
    from tokenmill.startup.sizing.forms import forms
    from tokenmill.startup.sizing.state_size import BYTES_OF

    platform = select_platform(config.device)
    model = config.model or str(demo_model_path())
    config = dataclasses.replace(config, model=model, device=platform.device).resolve()
    with opened(config) as (folder, stored):
        architecture = read_architecture(folder)
        weights = architecture.num_parameters() * BYTES_OF[config.dtype]
        choices = forms(config, platform, folder, architecture, choose_threads(config, platform, weights)[0])
        lines = [
            ("model", config.model),
            ("family", architecture.name),
            ("parameters", f"{architecture.num_parameters() / 1e6:,.4g} million"),
            ("layers", f"{len(architecture.layers)}, {architecture.hidden_size:,} wide"),
            ("context", f"{architecture.max_position:,} tokens"),
            ("vocabulary", f"{architecture.vocab_size:,} tokens"),
            ("takes", _inputs(architecture)),
            ("stored", stored.removeprefix("; ").removeprefix("stored: ") or "no weights here"),
            *_formats(choices),
            *_work(folder, architecture),
        ]
        if sampling := default_sampling(folder):
            lines.append(("sampling", ", ".join(f"{name} {value}" for name, value in sampling.items())))
    return lines


def _formats(choices: Sequence[Form]) -> list[Line]:
    """Return the formats in which this machine can serve the model, with the memory of the weights and the flags."""
    texts = [f"{one.name}: {size_text(one.weight_bytes)}{f' ({one.flags})' if one.flags else ''}" for one in choices]
    return [("formats" if index == 0 else "", text) for index, text in enumerate(texts)]


def _inputs(architecture: Architecture) -> str:
    takes = {"text": True, "images": architecture.takes_images, "sound": architecture.takes_sound}
    return ", ".join(name for name, is_taken in takes.items() if is_taken)


def _work(folder: Path, architecture: Architecture) -> list[Line]:
    """Return what a model is for, of those that chat what their template can do."""
    from tokenmill.core.pooling import PoolingTask
    from tokenmill.model.pooling.files import read_pooling

    if architecture.clip_length:
        return [("for", "speech in, text out: /v1/audio/transcriptions and /v1/audio/translations")]
    pooling = read_pooling(folder)
    if pooling is None:
        return _chat(folder, architecture)
    if pooling.task is PoolingTask.EMBED:
        return [("for", "vectors of texts: /v1/embeddings, tokenmill embed")]
    return [("for", "scores of texts: /v1/rerank, /v1/score, /classify")]


def _chat(folder: Path, architecture: Architecture) -> list[Line]:
    """Return what the chat template can do; of a model on the hub whose tokenizer is not here, that it is unknown."""
    if not (folder / "tokenizer.json").is_file():
        return [("template", "unknown until the model is here: tokenmill pull")]
    from tokenmill.serving.frontend.chat_template import load_chat_template
    from tokenmill.serving.frontend.parser_finder import ParserFinder
    from tokenmill.serving.frontend.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(folder)
    template = load_chat_template(folder, tokenizer.special_tokens)
    if template is None:
        return [("template", "none: the model completes texts and does not chat")]
    finder = ParserFinder(template, tokenizer, architecture.name)
    found = (("tools", finder.notation()), ("thinking", finder.style()))
    return [(label, f"{one.name or 'none'} ({one.reason})") for label, one in found]
