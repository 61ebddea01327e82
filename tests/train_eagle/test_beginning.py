"""A head begins as the best linear guess of the next hidden state, token and all."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows
from examples.train_eagle.beginning import begin, regression
from examples.train_eagle.features import NAMES, Features
from examples.train_eagle.head import EagleHead, HeadShape
from safetensors.torch import save_file

from tests.seeding import seed_for

SIZE, LENGTH, VOCAB = 24, 400, 50
SHAPE = HeadShape(SIZE, 4, 2, 12, 16, VOCAB, rope_theta=100.0)


def test_what_is_linear_is_known_from_the_beginning(tmp_path):
    generator = torch.Generator().manual_seed(seed_for("linear"))
    torch.manual_seed(seed_for("head"))

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    ids, taps = torch.randint(VOCAB, (LENGTH,), generator=generator), drawn(LENGTH, 3 * SIZE)
    embedding, norm = drawn(VOCAB, SIZE), 0.5 + torch.rand(SIZE, generator=generator)
    of_taps, of_tokens = drawn(SIZE, 3 * SIZE) / 8, drawn(SIZE, SIZE) / 5
    guess = taps[:-1] @ of_taps.T + F.rms_norm(embedding[ids[1:]], (SIZE,)) @ of_tokens.T
    final = torch.cat((torch.zeros(1, SIZE), guess * norm))
    is_answer = torch.arange(LENGTH) > 10
    parts = (taps, final, torch.zeros(LENGTH, dtype=torch.int32), ids.int(), is_answer, torch.tensor([0, LENGTH]))
    save_file(dict(zip(NAMES, parts, strict=True)), tmp_path / "features.safetensors")
    features = Features([tmp_path / "features.safetensors"])
    linear = regression(features, embedding, norm)
    assert linear.explained > 0.9
    for got, want in ((linear.of_taps, of_taps), (linear.of_tokens, of_tokens)):
        assert F.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.98
    head = EagleHead(SHAPE)
    begin(head, features, embedding, norm, drawn(VOCAB, SIZE))
    (hidden,) = head(taps[None], embedding[ids][None], 1)
    alike = F.cosine_similarity(hidden[0, 11:-1], guess[11:], dim=-1)
    without_tokens = F.cosine_similarity(taps[11:-1] @ of_taps.T, guess[11:], dim=-1)
    assert alike.mean() > without_tokens.mean() + 0.05
