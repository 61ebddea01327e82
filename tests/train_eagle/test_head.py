"""A head's training forward is drafting: all depths of all rows at once are those that come one by one."""

from __future__ import annotations

import torch
from examples.train_eagle.batches import Batch, Vocabulary
from examples.train_eagle.export import config_of, read_checkpoint, write_checkpoint
from examples.train_eagle.features import Row
from examples.train_eagle.head import EagleHead, HeadShape
from torch import Tensor

from tests.seeding import seed_for

SHAPE = HeadShape(24, 4, 2, 8, 20, 50, rope_theta=100.0)
DEPTHS = 4


def random_head() -> EagleHead:
    head = EagleHead(SHAPE)
    generator = torch.Generator().manual_seed(seed_for("head"))
    for weight in head.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5 + (weight.ndim == 1)
    head.tap_scale += torch.rand(head.tap_scale.shape, generator=generator)
    return head


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean() + SHAPE.rms_eps).rsqrt() * weight


def turned(x: Tensor, position: int) -> Tensor:
    """Rotate heads [n, head_dim] by complex numbers."""
    half = SHAPE.head_dim // 2
    angles = position * SHAPE.rope_theta ** (-torch.arange(half) / half)
    whole = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones(half), angles)
    return torch.cat((whole.real, whole.imag), -1)


class Drafting:
    """A head with its KV, row by row, written from the formulas alone."""

    def __init__(self, head: EagleHead) -> None:
        self.w = head.weights()
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def step(self, hidden: Tensor, token: Tensor, position: int) -> Tensor:
        """Run one row, keep its KV, and return its hidden state before the last norm."""
        w = {name.removeprefix("midlayer."): weight for name, weight in self.w.items()}
        x = torch.cat((norm(token, w["input_layernorm.weight"]), norm(hidden, w["hidden_norm.weight"])))
        q, k, v = ((w[f"self_attn.{name}_proj.weight"] @ x).view(-1, SHAPE.head_dim) for name in "qkv")
        self.keys.append(turned(k, position))
        self.values.append(v)
        groups, heads = SHAPE.num_heads // SHAPE.num_kv_heads, []
        for number, query in enumerate(turned(q, position)):
            scores = torch.stack([query @ key[number // groups] for key in self.keys]) * SHAPE.head_dim**-0.5
            weights = torch.softmax(scores, 0)
            heads.append(sum(a * v[number // groups] for a, v in zip(weights, self.values, strict=True)))
        r = hidden + w["self_attn.o_proj.weight"] @ torch.cat(heads)
        y = norm(r, w["post_attention_layernorm.weight"])
        gate, up = w["mlp.gate_proj.weight"] @ y, w["mlp.up_proj.weight"] @ y
        return r + w["mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)


def test_each_depth_of_the_training_forward_is_what_drafting_gives_step_by_step():
    head, generator = random_head(), torch.Generator().manual_seed(seed_for("taps"))
    length = 11
    taps = torch.randn(1, length, 3 * SHAPE.hidden_size, generator=generator)
    tokens = torch.randn(1, length, SHAPE.hidden_size, generator=generator)
    got = torch.stack(head(taps, tokens, DEPTHS))[:, 0]
    drafting = Drafting(head)
    compared = 0
    for row in range(length - DEPTHS):
        hidden = drafting.step(drafting.w["fc.weight"] @ taps[0, row], tokens[0, row + 1], row)
        torch.testing.assert_close(got[0, row], hidden, rtol=1e-5, atol=1e-5)
        kept = len(drafting.keys)
        for depth in range(1, DEPTHS):
            hidden = drafting.step(hidden, tokens[0, row + 1 + depth], row + depth)
            torch.testing.assert_close(got[depth, row], hidden, rtol=1e-5, atol=1e-5)
            compared += 1
        del drafting.keys[kept:], drafting.values[kept:]
    assert compared == (length - DEPTHS) * (DEPTHS - 1)


def test_padding_changes_nothing_before_it():
    head, generator = random_head(), torch.Generator().manual_seed(seed_for("padding"))
    taps = torch.randn(1, 9, 3 * SHAPE.hidden_size, generator=generator)
    tokens = torch.randn(1, 9, SHAPE.hidden_size, generator=generator)
    whole = head(taps, tokens, DEPTHS)
    padded = head(*(torch.nn.functional.pad(each, (0, 0, 0, 5), value=3.0) for each in (taps, tokens)), DEPTHS)
    for depth, (a, b) in enumerate(zip(whole, padded, strict=True)):
        torch.testing.assert_close(b[:, : 8 - depth], a[:, : 8 - depth], rtol=1e-5, atol=1e-5)


def test_a_place_of_a_batch_is_drafted_from_one_row_further_back_at_each_depth():
    ids, is_answer = torch.arange(8), torch.tensor([0, 0, 0, 0, 0, 1, 1, 0]).bool()
    row = Row(ids, is_answer, torch.zeros(8, 6), torch.zeros(8, 2), 10 * ids)
    batch = Batch.of([row, row])
    assert batch.columns.tolist() == [4, 5, 4, 5]
    assert batch.rows.tolist() == [0, 0, 1, 1]
    assert batch.best.tolist() == [40, 50, 40, 50]
    hidden = torch.arange(8.0)[None, :, None].expand(2, 8, 1)
    assert [batch.at_depth(hidden, depth)[:2, 0].tolist() for depth in range(3)] == [[3, 4], [2, 3], [1, 2]]
    known = batch.known_to(Vocabulary.of(torch.tensor([7, 50]), 60))
    assert known.columns.tolist() == [5, 5]


def test_a_checkpoint_reads_back(tmp_path):
    head, generator = random_head(), torch.Generator().manual_seed(seed_for("ids"))
    ids = torch.randperm(90, generator=generator)[: SHAPE.draft_vocab_size].sort().values
    vocabulary = Vocabulary.of(ids, 90)
    target = {"vocab_size": 90, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}
    write_checkpoint(tmp_path, head, vocabulary, target, (2, 3, 4))
    again, same = read_checkpoint(tmp_path)
    assert again.shape == SHAPE
    assert torch.equal(same.ids, vocabulary.ids)
    assert torch.equal(same.places, vocabulary.places)
    for name, weight in head.weights().items():
        assert torch.equal(again.state_dict()[name], weight.bfloat16().float())
    config = config_of(SHAPE, target, (2, 3, 4))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 4]


def test_the_most_frequent_tokens_are_drafted_in_the_order_of_their_ids():
    tokens = torch.tensor([5, 5, 5, 2, 2, 9, 7])
    vocabulary = Vocabulary.most_frequent(tokens, 3, 12)
    assert vocabulary.ids.tolist() == [2, 5, 7]
    assert vocabulary.places[[2, 5, 7, 9]].tolist() == [0, 1, 2, -1]
    assert vocabulary.coverage(tokens) == 6 / 7
