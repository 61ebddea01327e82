"""Hugging Face transformers: `generate` over a batch."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.peers.adapters.adapter import OnStep, Setup, main
from transformers import AutoModelForCausalLM, StoppingCriteria


class _Watch(StoppingCriteria):
    """Is asked after each step whether to stop; says no and tells `on_step`."""

    def __init__(self, batch_size: int, on_step: OnStep) -> None:
        self._batch_size = batch_size
        self._on_step = on_step
        self._steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **how: Any) -> torch.Tensor:
        self._steps += 1
        self._on_step([self._steps] * self._batch_size)
        return torch.zeros(self._batch_size, dtype=torch.bool)


class Transformers:
    """A model class of transformers in bfloat16."""

    packages = ("transformers", "torch")

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        folder, _, name = setup.model.rpartition("/")
        file = {"gguf_file": name} if name.endswith(".gguf") else {}
        model = AutoModelForCausalLM.from_pretrained(folder if file else setup.model, dtype=torch.bfloat16, **file)
        self._model = model.eval()

    def prepare(self, batch_size: int, context_len: int) -> None:
        """Nothing: the cache grows as it goes."""

    def generate(self, prompts: list[list[int]], num_tokens: int, on_step: OnStep) -> None:
        """As one batch of equal lengths."""
        input_ids = torch.tensor(prompts)
        with torch.inference_mode():
            self._model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=num_tokens,
                do_sample=False,
                eos_token_id=None,
                stopping_criteria=[_Watch(len(prompts), on_step)],
            )

    def logits(self, chunk: list[int]) -> Any:
        """Return those of a forward pass."""
        with torch.inference_mode():
            return self._model(torch.tensor([chunk])).logits[0].float().numpy()

    def weight_bytes(self) -> int:
        """Return the memory of all parameters."""
        return sum(one.nbytes for one in self._model.parameters())


if __name__ == "__main__":
    main(Transformers)
