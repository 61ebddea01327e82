"""Read the pooling of a checkpoint: from sentence-transformers' files, from config.json, and from what is asked for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenmill.config.model_files import read_json
from tokenmill.core.errors import InvalidCheckpoint, InvalidConfig
from tokenmill.core.pooling import PoolingTask, PoolMode
from tokenmill.model.pooling.modules import MODULES, Modules, read_activation, read_limits, read_modules
from tokenmill.model.pooling.spec import (
    Activation,
    DenseSpec,
    LayerNormSpec,
    PoolingSpec,
    RowScoreSpec,
    Step,
    TokenScoreSpec,
)

CLASSIFIER = "ForSequenceClassification"
BARE = re.compile(r"(\w+?)(Text)?Model")
# Of those that attend both ways, the states of all tokens know the whole text.
ENCODERS = re.compile(
    r"(Bert|Roberta|XLMRoberta|ModernBert|NomicBert|New|Gte|JinaBert|JinaEmbeddingsV3|DistilBert|MPNet)"
)
# Layers of the heads of `XForSequenceClassification`, by the beginning of X; of decoders: `score`, without a bias.
_POOLER = (DenseSpec("", "pooler.dense", Activation.TANH, True), DenseSpec("", "classifier", Activation.IDENTITY, True))
_ROBERTA = (
    DenseSpec("", "classifier.dense", Activation.TANH, True),
    DenseSpec("", "classifier.out_proj", Activation.IDENTITY, True),
)
_MODERN = (
    DenseSpec("", "head.dense", Activation.GELU),
    LayerNormSpec("", "head.norm"),
    DenseSpec("", "classifier", Activation.IDENTITY, True),
)
_HEADS: Mapping[str, tuple[Step, ...]] = MappingProxyType(
    {
        "Bert": _POOLER,
        "NomicBert": _POOLER,
        "New": _POOLER,
        "Gte": _POOLER,
        "Roberta": _ROBERTA,
        "XLMRoberta": _ROBERTA,
        "JinaEmbeddingsV3": _ROBERTA,
        "ModernBert": _MODERN,
    }
)
_DECODER_HEAD = (DenseSpec("", "score", Activation.IDENTITY, False),)
# Of encoders in GGUF files, of RoBERTa's kind and ModernBERT's: the activation of the first layer, and what it takes.
_GGUF_HEADS: Mapping[str, tuple[Activation, PoolMode]] = MappingProxyType(
    {"BertModel": (Activation.TANH, PoolMode.CLS), "ModernBertModel": (Activation.GELU, PoolMode.MEAN)}
)
YES, NO = "yes", "no"
# llama.cpp's pooling type of what scores.
_RANK = 4


def read_pooling(folder: Path, task: str = "auto") -> PoolingSpec | None:
    """Read the pooling of a checkpoint; None: its model generates.

    Args:
        task: a value of `--task`.

    Raises:
        InvalidCheckpoint: a file is broken, or something in it is not supported; names it.
        InvalidConfig: the model cannot do the task.
    """
    config = read_json(folder, "config.json")
    name = str((config.get("architectures") or [""])[0])
    said = read_json(folder, "config_sentence_transformers.json")
    modules = read_modules(folder)
    is_classifier, is_bare = name.endswith(CLASSIFIER), BARE.fullmatch(name) is not None
    is_generator = not is_classifier and not is_bare
    if config.get("is_causal") is False and not ENCODERS.match(name) and task != "generate":
        raise InvalidCheckpoint(f"{folder}/config.json: is_causal false is not supported: decoders are causal")
    if task == "generate":
        if is_generator:
            return None
        raise InvalidConfig(f"--task generate: {name} has no output head; leave the flag out")
    if said.get("model_type") == "SparseEncoder":
        raise InvalidCheckpoint(f"{folder}: SparseEncoder models are not supported")
    if task == "rerank" and is_bare:
        raise InvalidConfig(f"--task rerank: {name} has no head for scores; serve it without the flag")
    if is_classifier:
        return _classifier(folder, config, said, name.removesuffix(CLASSIFIER))
    if config.get("gguf_pooling") == _RANK:
        return _ranker_of_gguf(folder, config, name)
    tokens = next((step for step in modules.steps if isinstance(step, TokenScoreSpec)), None) if modules else None
    if tokens is not None or task == "rerank":
        return _by_tokens(folder, config, said, tokens or TokenScoreSpec(YES, NO))
    is_said = modules is not None or is_bare or "gguf_pooling" in config or task == "embed" or _sees_all(config, name)
    return _embedder(folder, config, said, modules, name) if is_said else None


def _ranker_of_gguf(folder: Path, config: Mapping[str, Any], name: str) -> PoolingSpec:
    """Return the pooling of a reranker or classifier as llama.cpp's converter stores it: rows of `cls.output`.

    Raises:
        InvalidCheckpoint: an encoder whose head is not whole.
    """
    labels, mode = _labels(config), PoolMode.LAST
    steps: tuple[Step, ...] = (DenseSpec("", "cls.output", Activation.IDENTITY),)
    if ENCODERS.match(name):
        steps, mode = _head_of_gguf(folder, config, name), _GGUF_HEADS[name][1]
    elif sorted(labels) == [NO, YES]:
        steps, labels = (RowScoreSpec("cls.output", labels.index(YES), labels.index(NO)),), (YES,)
    return PoolingSpec(
        task=PoolingTask.CLASSIFY,
        modes=(mode,),
        steps=steps,
        activation=_score_activation(folder, config, {}, len(labels)),
        labels=labels,
    )


def _head_of_gguf(folder: Path, config: Mapping[str, Any], name: str) -> tuple[Step, ...]:
    """Return the layers of an encoder's head.

    Raises:
        InvalidCheckpoint: the file lacks the first, as BERT's do: llama.cpp's converter leaves the pooler out.
    """
    found = config.get("gguf_layers") or ()
    if name not in _GGUF_HEADS or not {"cls", "cls.output"} <= {*found}:
        raise InvalidCheckpoint(
            f"{folder}: the file has no tensor cls.weight, which its scores go through: serve the model's safetensors"
        )
    steps: list[Step] = [DenseSpec("", "cls", _GGUF_HEADS[name][0])]
    steps += [LayerNormSpec("", "cls.norm")] if "cls.norm" in found else []
    return (*steps, DenseSpec("", "cls.output", Activation.IDENTITY))


def _embedder(
    folder: Path, config: Mapping[str, Any], said: Mapping[str, Any], modules: Modules | None, name: str
) -> PoolingSpec:
    """Return the pooling of a model of vectors; where files say nothing, as sentence-transformers takes it."""
    assumed: tuple[str, ...] = ()
    modes = modules.modes if modules is not None else ()
    if not modes:
        modes = (_mode_of_gguf(folder, config) or (PoolMode.MEAN if _sees_all(config, name) else PoolMode.LAST),)
        if "gguf_pooling" not in config:
            assumed = (f"{folder} has no {MODULES} with a Pooling module: {modes[0].value} pooling is assumed",)
    max_length, lowers_case = read_limits(folder)
    prompts, default = _prompts(folder, said)
    sizes = _matryoshka(folder, config)
    is_cross = said.get("model_type") == "CrossEncoder"
    steps = tuple(modules.steps) if modules is not None else _dense_of_gguf(config)
    last = steps[-1] if steps else None
    labels: tuple[str, ...] = ()
    if is_cross and isinstance(last, DenseSpec) and last.sizes is not None:
        labels = _labels(config, last.sizes[1])
    return PoolingSpec(
        task=PoolingTask.CLASSIFY if labels else PoolingTask.EMBED,
        modes=modes,
        includes_prompt=modules is None or modules.includes_prompt,
        steps=steps,
        activation=_score_activation(folder, config, said, len(labels)) if labels else Activation.IDENTITY,
        labels=labels,
        prompts=prompts,
        default_prompt=default,
        takes_dimensions=sizes is not None,
        dimensions=sizes or (),
        max_length=max_length,
        lowers_case=lowers_case,
        assumed=assumed,
    )


def _sees_all(config: Mapping[str, Any], name: str) -> bool:
    """Return True for a model whose tokens attend to all others, and which generates nothing for that."""
    return ENCODERS.match(name) is not None or config.get("use_bidirectional_attention") is True


def _dense_of_gguf(config: Mapping[str, Any]) -> tuple[Step, ...]:
    """Return the layers behind the pooled states of EmbeddingGemma, whose converter takes those without a bias."""
    names = [name for name in config.get("gguf_layers") or () if name.startswith("dense_")]
    return tuple(DenseSpec("", name, Activation.IDENTITY, False) for name in names)


def _classifier(folder: Path, config: Mapping[str, Any], said: Mapping[str, Any], stem: str) -> PoolingSpec:
    """Return the pooling of `XForSequenceClassification`."""
    tokens = config.get("classifier_from_token")
    if tokens is not None:
        if not isinstance(tokens, list) or not 1 <= len(tokens) <= 2:
            raise InvalidCheckpoint(f"{folder}/config.json: classifier_from_token must list one token, or two")
        return _by_tokens(folder, config, said, TokenScoreSpec(tokens[-1], tokens[0] if len(tokens) == 2 else ""))
    labels = _labels(config)
    is_encoder = ENCODERS.match(stem) is not None
    if is_encoder and stem not in _HEADS:
        raise InvalidCheckpoint(f"{folder}/config.json: the head of {stem}{CLASSIFIER} is not supported")
    mode = PoolMode.CLS if is_encoder else PoolMode.LAST
    if config.get("classifier_pooling") == "mean":
        mode = PoolMode.MEAN
    return PoolingSpec(
        task=PoolingTask.CLASSIFY,
        modes=(mode,),
        steps=_HEADS[stem] if is_encoder else _DECODER_HEAD,
        activation=_score_activation(folder, config, said, len(labels)),
        labels=labels,
        max_length=read_limits(folder)[0],
    )


def _by_tokens(folder: Path, config: Mapping[str, Any], said: Mapping[str, Any], score: TokenScoreSpec) -> PoolingSpec:
    """Return the pooling of a decoder whose score is told by its next token."""
    prompts, default = _prompts(folder, said)
    return PoolingSpec(
        task=PoolingTask.CLASSIFY,
        modes=(PoolMode.LAST,),
        steps=(score,),
        activation=_score_activation(folder, config, said, 1),
        labels=_labels(config, 1),
        prompts=prompts,
        default_prompt=default,
        max_length=read_limits(folder)[0],
    )


def _score_activation(folder: Path, config: Mapping[str, Any], said: Mapping[str, Any], count: int) -> Activation:
    """Return the activation of scores: as sentence-transformers' fields name it, else by the kind of problem."""
    part = config.get("sentence_transformers")
    names = (
        part.get("activation_fn") if isinstance(part, dict) else None,
        config.get("sbert_ce_default_activation_function"),
        said.get("activation_fn"),
    )
    stated = next((name for name in names if name is not None), None)
    if stated is not None:
        return read_activation(stated, f"{folder}: the activation of scores")
    problem = config.get("problem_type")
    if problem == "regression":
        return Activation.IDENTITY
    if problem == "multi_label_classification" or count == 1:
        return Activation.SIGMOID
    return Activation.SOFTMAX


def _labels(config: Mapping[str, Any], count: int | None = None) -> tuple[str, ...]:
    """Return the names of labels; `count`: as many, whatever the file says; None: as the file says, else two."""
    names = config.get("id2label")
    if isinstance(names, dict) and count in (None, len(names)):
        return tuple(str(names[key]) for key in sorted(names, key=lambda key: int(key) if key.isdigit() else 0))
    stated = config.get("num_labels")
    number = count or (stated if isinstance(stated, int) and stated > 0 else 2)
    return tuple(f"LABEL_{index}" for index in range(number))


def _prompts(folder: Path, said: Mapping[str, Any]) -> tuple[tuple[tuple[str, str], ...], str]:
    prompts, default = said.get("prompts") or {}, said.get("default_prompt_name") or ""
    path = folder / "config_sentence_transformers.json"
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise InvalidCheckpoint(f"{path}: prompts must map names to texts")
    if default and default not in prompts:
        raise InvalidCheckpoint(f"{path}: default_prompt_name {default!r} is not in prompts")
    return tuple(prompts.items()), default


def _matryoshka(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the sizes that vectors may be cut to, empty: any; None: they may not."""
    sizes = config.get("matryoshka_dimensions")
    if sizes is None:
        return () if config.get("is_matryoshka") is True else None
    if not isinstance(sizes, list) or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise InvalidCheckpoint(f"{folder}/config.json: matryoshka_dimensions must be a list of sizes")
    return tuple(sizes)


def _mode_of_gguf(folder: Path, config: Mapping[str, Any]) -> PoolMode | None:
    """Return the mode that a GGUF file's `pooling_type` stands for; None: it has none."""
    kind = config.get("gguf_pooling")
    if kind is None:
        return None
    modes = {1: PoolMode.MEAN, 2: PoolMode.CLS, 3: PoolMode.LAST}
    if kind not in modes:
        raise InvalidCheckpoint(f"{folder}: pooling_type {kind!r} is not supported")
    return modes[kind]
