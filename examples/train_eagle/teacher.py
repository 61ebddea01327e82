"""The model that a head drafts for, in plain torch: hidden states of whole dialogues, and what the model says next.

Its weights are read by TokenMill, whichever way they are stored, and run by transformers in float32. Knows no heads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

from tokenmill.model.kernels.torch_kernels import TorchKernels
from tokenmill.model.quantization.packed import dense
from tokenmill.model.weights.checkpoint import read_architecture
from tokenmill.model.weights.hub import fetch
from tokenmill.model.weights.loader import plan_model


@dataclass(frozen=True)
class Hidden:
    """The hidden states of the model for a dialogue of T tokens.

    Attributes:
        taps: [T, 3 * hidden_size], the residual stream at three boundaries side by side.
        final: [T, hidden_size] behind the final norm.
    """

    taps: Tensor
    final: Tensor


def tap_boundaries(num_layers: int) -> tuple[int, int, int]:
    """Return behind how many layers the residual stream is read; EAGLE-3's choice."""
    return 2, num_layers // 2, num_layers - 3


class Teacher:
    """A model with its weights in float32.

    Attributes:
        folder: of the model, with config.json and tokenizer.json.
        boundaries: see `tap_boundaries`.
    """

    def __init__(self, model: str) -> None:
        self.folder = fetch(model, None, None)
        # By the class that config.json names: one that was made of a GGUF file names no model type.
        (name,) = json.loads((self.folder / "config.json").read_text())["architectures"]
        made_of = getattr(transformers, name)
        self.config = made_of.config_class.from_pretrained(self.folder)
        self.boundaries = tap_boundaries(self.config.num_hidden_layers)
        self._model = made_of(self.config).float().eval()
        _fill(self._model, self.folder)

    @property
    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]."""
        return self._model.get_input_embeddings().weight.detach()

    @property
    def head(self) -> Tensor:
        """[vocab_size, hidden_size]."""
        return self._model.get_output_embeddings().weight.detach()

    @property
    def norm(self) -> Tensor:
        """Weight of the final norm, [hidden_size]."""
        return self._model.model.norm.weight.detach()

    @torch.inference_mode()
    def hidden(self, batch: Sequence[Sequence[int]]) -> list[Hidden]:
        """Return the hidden states of dialogues, run side by side."""
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in batch], batch_first=True)
        # Padding stands on the right, where causality hides it.
        states = self._model.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        taps = torch.cat([states.hidden_states[boundary] for boundary in self.boundaries], -1)
        last = states.last_hidden_state
        return [Hidden(taps[row, : len(own)], last[row, : len(own)]) for row, own in enumerate(batch)]

    @torch.inference_mode()
    def best(self, final: Tensor) -> Tensor:
        """Return the most likely next tokens, [N] int64, of hidden states [N, hidden_size]."""
        return (final @ self.head.T).argmax(-1)


def _fill(model: torch.nn.Module, folder: Path) -> None:
    plan = plan_model(folder, read_architecture(folder), TorchKernels("float32", "cpu"))
    names = {target.key: target.name for target in plan.shapes.targets()}
    assert plan.reads is not None, "weights that lie in files"
    state = {names[read.key]: torch.from_numpy(dense(read.rows()).float32()) for read in plan.reads}
    missing, surplus = model.load_state_dict(state, strict=False)
    if surplus or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"{folder}: transformers has other weights than TokenMill reads: {[*missing, *surplus][:3]}")
