"""MTP layers for random checkpoints, as Qwen3.5 and Qwen3-Next store theirs, and their formulas in torch.

The layer itself is the family's own in transformers, which does not run MTP: what stands around it is written here from
the published description.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import load_oracle, randomize

FULL = "full_attention"
NORMS = {"pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm", "norm": "norm"}


class MtpLayer(torch.nn.Module):
    """A layer that drafts: of a token and of the model's last hidden state before it, the token behind it."""

    def __init__(self, oracle: Any) -> None:
        super().__init__()
        self.inner = oracle.model
        kinds = oracle.config.layer_types
        self.place = max(index for index, kind in enumerate(kinds) if kind == FULL)
        self.layer = type(self.inner.layers[self.place])(oracle.config, self.place)
        size = oracle.config.hidden_size
        self.fc = torch.nn.Linear(2 * size, size, bias=False)
        self.embedding_norm, self.hidden_norm, self.norm = (copy.deepcopy(self.inner.norm) for _ in range(3))

    def own(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the layer by their names in checkpoints."""
        found = {f"mtp.layers.0.{name}": one for name, one in self.layer.state_dict().items()}
        found |= {f"mtp.{name}.weight": getattr(self, attribute).weight for name, attribute in NORMS.items()}
        return {**found, "mtp.fc.weight": self.fc.weight}

    @torch.inference_mode()
    def logits(self, head: torch.nn.Linear, text: Sequence[int], drafts: Sequence[int]) -> list[torch.Tensor]:
        """Return the logits of each draft behind a text, and behind the drafts before it."""
        hidden, tokens, found = self.inner(torch.tensor([text[:-1]])).last_hidden_state, list(text[1:]), []
        for draft in drafts:
            embedded = self.inner.embed_tokens(torch.tensor([tokens]))
            x = self.fc(torch.cat((self.embedding_norm(embedded), self.hidden_norm(hidden)), -1))
            count = x.shape[1]
            mask = torch.full((count, count), -torch.inf, dtype=x.dtype).triu(1)[None, None]
            turned = self.inner.rotary_emb(x, torch.arange(count)[None])
            normed = self.norm(self.layer(x, position_embeddings=turned, attention_mask=mask))
            found.append(head(normed[0, -1]))
            hidden = torch.cat((hidden, normed[:, -1:]), 1)
            tokens.append(draft)
        return found


def add_mtp(folder: Path, seed: int) -> MtpLayer:
    """Write a random layer into a checkpoint of one file; return it."""
    oracle = load_oracle(folder)
    layer = MtpLayer(oracle)
    own = torch.nn.ModuleList([layer.layer, layer.fc, layer.embedding_norm, layer.hidden_norm, layer.norm])
    randomize(own, seed)
    return store(folder, layer.eval())


def add_copy(folder: Path) -> MtpLayer:
    """Make the model one of which one layer does all, and write a copy of that as its layer for drafts.

    All layers but the last that attends leave the hidden states as they are, though their states run; and
    embeddings have a mean square of 1, so that a norm does not change them. A draft is then what the model would say
    if it had not seen the first token.
    """
    oracle: Any = load_oracle(folder)
    made = MtpLayer(oracle)
    with torch.no_grad():
        for index, layer in enumerate(oracle.model.layers):
            for name, weight in layer.named_parameters():
                if index != made.place and name.endswith(
                    ("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj")
                ):
                    weight.zero_()
        embedding = oracle.get_input_embeddings().weight
        embedding.div_(embedding.square().mean(-1, keepdim=True).sqrt())
        made.layer.load_state_dict(oracle.model.layers[made.place].state_dict())
        made.embedding_norm.weight.zero_()  # an offset from 1
        size = oracle.config.hidden_size
        made.fc.weight.copy_(torch.cat((torch.eye(size), torch.zeros(size, size)), 1))
    oracle.save_pretrained(folder)
    return store(folder, made.eval())


def store(folder: Path, layer: MtpLayer) -> MtpLayer:
    """Add the layer's tensors to the checkpoint's file, experts as its model's are stored."""
    path = folder / "model.safetensors"
    tensors, own = load_file(path), layer.own()
    if any(".experts.0.gate_proj" in name for name in tensors):
        for name in [name for name in own if ".experts." in name]:
            own |= _apart(name, own.pop(name))
    save_file(tensors | {name: one.detach().contiguous().clone() for name, one in own.items()}, path, {"format": "pt"})
    return layer


def _apart(name: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    root, found = name.rpartition(".")[0], {}
    for expert, one in enumerate(stacked):
        parts = {"down_proj": one}
        if name.endswith("gate_up_proj"):
            parts = dict(zip(("gate_proj", "up_proj"), one.chunk(2), strict=True))
        found |= {f"{root}.{expert}.{part}.weight": weight for part, weight in parts.items()}
    return found
