"""Held-out accuracy by teacher forcing: cheap enough to run while training.

If the most likely token equals the expected one at every position of the answer, then greedy decoding gives exactly
the expected answer; so for skills with one right answer this equals greedy accuracy, in a single pass.
"""

from __future__ import annotations

import random

import torch
from data import Encoder, Row, pad_rows
from skills import SKILLS

from model import DemoModel


def heldout_rows(encoder: Encoder, per_skill: int, seed: int = 7) -> dict[str, list[Row]]:
    """Rows of the held-out part by skill; the mask is cut to the last answer."""
    rows = {}
    for name, generate in SKILLS.items():
        rng = random.Random(f"heldout-{seed}-{name}")
        found = encoder.rows([generate(rng, "heldout") for _ in range(per_skill)])
        for row in found:
            begin, _ = encoder.answer_span(row)
            row.mask[:begin] = False
        rows[name] = found
    return rows


@torch.no_grad()
def accuracies(model: DemoModel, rows: dict[str, list[Row]], pad: int) -> dict[str, float]:
    """Share of answers that greedy decoding would give exactly, by skill; stories report their loss instead."""
    scores = {}
    for name, group in rows.items():
        right, total, loss = 0, 0, 0.0
        by_length = sorted(group, key=lambda row: len(row.ids))
        for begin in range(0, len(group), 30):
            ids_array, mask_array = pad_rows(by_length[begin : begin + 30], pad)
            ids, mask = torch.from_numpy(ids_array), torch.from_numpy(mask_array)
            if not group[0].sample.exact:
                loss += model.loss(ids, mask).item() * len(ids)
                total += len(ids)
                continue
            hidden = model.hidden(ids)[:, :-1]
            chosen = mask[:, 1:]
            wrong = torch.zeros_like(chosen)
            wrong[chosen] = model.logits(hidden[chosen]).argmax(-1) != ids[:, 1:][chosen]
            right += int((~wrong.any(dim=1)).sum())
            total += len(ids)
        scores[name] = round(right / total if group[0].sample.exact else loss / total, 3)
    return scores
