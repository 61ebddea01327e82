"""Trains the adapter in `examples/pirate` with peft: the demo model's own answers, as a pirate would give them.

    python adapter.py --out ../pirate [--steps 600] [--threads 2]

Minutes on two cores. The questions are those of the skills that answer in words; the loss falls on what the assistant
says, as in `train.py`. Prints the loss now and then, and at the end how many held-out answers begin and end as a
pirate's.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path

import peft
import torch
from data import Encoder
from skills import SKILLS, Sample, Split, assistant
from transformers import AutoModelForCausalLM

from tokenmill.demo import demo_model_path

TALKATIVE = ("faq", "about", "scope", "story")
BEGINNING, END = "Arr! ", " Yo ho ho!"
IGNORED = -100  # a label without loss
BATCH, MOST_TOKENS = 16, 256
PEAK_RATE = 3e-3
HELD_OUT = 40


def sample_of(rng: random.Random, split: Split) -> Sample:
    """A question and a pirate's answer to it; earlier turns stay as they are and carry no loss."""
    while True:
        sample = SKILLS[rng.choice(TALKATIVE)](rng, split)
        *before, answer = sample.messages
        if not sample.tools and "reasoning_content" not in answer:
            said = assistant(BEGINNING + answer["content"] + END)
            return replace(sample, messages=(*before, said), last_only=True)


def batch_of(encoder: Encoder, rng: random.Random) -> dict[str, torch.Tensor]:
    """Padded ids, mask and labels, [BATCH, tokens of the longest]."""
    rows = []
    while len(rows) < BATCH:
        rows += [row for row in encoder.rows([sample_of(rng, "train")]) if len(row.ids) <= MOST_TOKENS]
    length = max(len(row.ids) for row in rows)
    ids = torch.full((BATCH, length), encoder.pad)
    labels = torch.full((BATCH, length), IGNORED)
    for index, row in enumerate(rows):
        tokens = torch.from_numpy(row.ids)
        ids[index, : len(tokens)] = tokens
        labels[index, : len(tokens)] = tokens.where(torch.from_numpy(row.mask), IGNORED)
    return {"input_ids": ids, "attention_mask": (ids != encoder.pad).long(), "labels": labels}


def train(model: peft.PeftModel, encoder: Encoder, rng: random.Random, steps: int) -> None:
    """Fit the adapter: AdamW, a rate that rises for a tenth of the steps and then falls as a cosine."""
    own = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=PEAK_RATE, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=steps, pct_start=0.1)
    for step in range(1, steps + 1):
        loss = model(**batch_of(encoder, rng)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        if step % 50 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def share_of_pirates(model: peft.PeftModel, encoder: Encoder, rng: random.Random) -> float:
    """Return the share of held-out answers, greedy, that are a pirate's from their beginning to their end."""
    model.eval()
    found = 0
    for _ in range(HELD_OUT):
        prompt = encoder.tokenizer.encode(encoder.text(sample_of(rng, "heldout"), prompt_only=True)).ids
        tokens = model.generate(input_ids=torch.tensor([prompt]), max_new_tokens=200, do_sample=False)[0, len(prompt) :]
        text = encoder.tokenizer.decode(tokens.tolist())
        found += text.startswith(BEGINNING) and text.endswith(END)
    return found / HELD_OUT


def main() -> None:
    """Train, try and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    rng, folder = random.Random(given.seed), demo_model_path()
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    shape = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, shape)
    encoder = Encoder(folder)
    train(model, encoder, rng, given.steps)
    print(f"a pirate's, of {HELD_OUT} held-out answers: {share_of_pirates(model, encoder, rng):.0%}")
    model.to(torch.bfloat16).save_pretrained(given.out)
    (given.out / "README.md").unlink(missing_ok=True)  # peft's has nothing in it
    config = given.out / "adapter_config.json"
    # Where the base model lay is nobody's business.
    known = json.loads(config.read_text()) | {"base_model_name_or_path": "tokenmill-demo"}
    config.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
