"""Small random embedders, rerankers and classifiers in the layouts of the hub, and plain references for them.

The decoder comes from `checkpoints`; what follows its states is computed here as sentence-transformers documents it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, processors

from tests.checkpoints import make_checkpoint

PACKAGE = "sentence_transformers.models."
NEW_PACKAGE = "sentence_transformers.sentence_transformer.modules."
POOLING = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
    "weightedmean": "pooling_mode_weightedmean_tokens",
    "lasttoken": "pooling_mode_lasttoken",
}
END = "<|endoftext|>"


@dataclass(frozen=True, kw_only=True)
class Modules:
    """Files that stand around a decoder that embeds.

    Attributes:
        modes: of 1_Pooling; None: there is no modules.json. is_new: its config has the form of version 6.
        is_bare: tensors have no prefix.
        dense: fields of the configs of Dense modules, with their tensors as `weight` and `bias_values`.
        adds_end: the tokenizer adds a token behind every text.
    """

    modes: tuple[str, ...] | None = ("lasttoken",)
    is_new: bool = False
    is_bare: bool = True
    dense: tuple[dict[str, Any], ...] = ()
    normalizes: bool = True
    include_prompt: bool = True
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_seq_length: int | None = None
    adds_end: bool = True


def make_embedder(
    folder: Path, modules: Modules | None = None, family: str = "qwen3", seed: int = 0, **overrides: Any
) -> Path:
    """Write an embedder as Qwen3-Embedding is laid out: tensors without `model.`, no output head, modules behind it."""
    modules = modules or Modules()
    make_checkpoint(folder, family, seed=seed, tie_word_embeddings=True, **overrides)
    if modules.is_bare:
        strip_prefix(folder)
    if modules.adds_end:
        add_end(folder)
    hidden_size = json.loads((folder / "config.json").read_text())["hidden_size"]
    is_new, package = modules.is_new, NEW_PACKAGE if modules.is_new else PACKAGE
    kinds = [("", "sentence_transformers.base.modules.transformer.Transformer" if is_new else f"{package}Transformer")]
    if modules.modes is not None:
        kinds.append(("1_Pooling", f"{package}pooling.Pooling" if is_new else f"{package}Pooling"))
        config = pooling_config(modules.modes, hidden_size, is_new, modules.include_prompt)
        _write(folder / "1_Pooling" / "config.json", config)
    for number, layer in enumerate(modules.dense, 2):
        kinds.append((f"{number}_Dense", f"{PACKAGE}Dense"))
        config = {name: value for name, value in layer.items() if name not in ("weight", "bias_values")}
        _write(folder / f"{number}_Dense" / "config.json", config)
        tensors = {"linear.weight": layer["weight"]}
        if layer.get("bias", True):
            tensors["linear.bias"] = layer["bias_values"]
        save_file(tensors, folder / f"{number}_Dense" / "model.safetensors")
    if modules.normalizes:
        kinds.append((f"{len(kinds)}_Normalize", f"{PACKAGE}Normalize"))
    if modules.modes is not None:
        listed = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(kinds)]
        _write(folder / "modules.json", listed)
    said = {"prompts": modules.prompts, "default_prompt_name": modules.default_prompt, "similarity_fn_name": "cosine"}
    _write(folder / "config_sentence_transformers.json", said)
    if modules.max_seq_length is not None:
        limits = {"max_seq_length": modules.max_seq_length, "do_lower_case": False}
        _write(folder / "sentence_bert_config.json", limits)
    return folder


def pooling_config(modes: tuple[str, ...], size: int, is_new: bool, include_prompt: bool = True) -> dict[str, Any]:
    """The fields of 1_Pooling/config.json in its old or new form."""
    if is_new:
        mode = modes[0] if len(modes) == 1 else list(modes)
        return {"embedding_dimension": size, "pooling_mode": mode, "include_prompt": include_prompt}
    flags = {name: mode in modes for mode, name in POOLING.items()}
    return {"word_embedding_dimension": size, **flags, "include_prompt": include_prompt}


def strip_prefix(folder: Path) -> None:
    """Store the tensors of a decoder without `model.`, as it saves itself alone."""
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})


def add_end(folder: Path, token: str = END) -> None:
    """Let the tokenizer add a token behind every text, and behind each of a pair."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = (token, tokenizer.token_to_id(token))
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {token}", f"$A {token} $B:1 {token}:1", [end])
    tokenizer.save(str(folder / "tokenizer.json"))


def make_classifier(folder: Path, num_labels: int, family: str = "qwen3", seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint of a decoder with a head `score`, as transformers saves it."""
    make_checkpoint(folder, family, seed=seed, **overrides)
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=num_labels)
    config.architectures = None
    torch.manual_seed(seed)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, config=config, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    return folder


class States:
    """The last states of a decoder, by transformers: [T, hidden_size] float64 after the final norm."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        self._model.eval()

    def __call__(self, text: str | list[int]) -> np.ndarray:
        ids = self.tokenizer.encode(text).ids if isinstance(text, str) else text
        with torch.inference_mode():
            return self._model(input_ids=torch.tensor([ids])).last_hidden_state[0].double().numpy()


def pooled(states: np.ndarray, modes: tuple[str, ...], first: int = 0) -> np.ndarray:
    """The pooled vector of a text's states, mode after mode in the order of sentence-transformers."""
    own = states[first:]
    weights = np.arange(first + 1, len(states) + 1)[:, None]
    found = {
        "cls": states[0],
        "max": own.max(0),
        "mean": own.mean(0),
        "mean_sqrt_len_tokens": own.sum(0) / len(own) ** 0.5,
        "weightedmean": (own * weights).sum(0) / weights.sum(),
        "lasttoken": states[-1],
    }
    return np.concatenate([found[mode] for mode in POOLING if mode in modes])


def unit(vector: np.ndarray) -> np.ndarray:
    """The vector with length 1."""
    return vector / np.linalg.norm(vector)


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))


def make_judge(folder: Path, seed: int = 0, **overrides: Any) -> Path:
    """Write a checkpoint that generates and has the tokens `yes` and `no`, as Qwen3-Reranker has."""
    make_checkpoint(folder, seed=seed, vocab_size=420, **overrides)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def judged(folder: Path, text: str) -> float:
    """The logit of `yes` less that of `no` behind a text, by transformers."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
    yes, no = (tokenizer.token_to_id(token) for token in ("yes", "no"))
    return float(logits[yes] - logits[no])
