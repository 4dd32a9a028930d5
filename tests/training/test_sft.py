"""Training on conversations (--sft). Reference: each conversation alone in a model, and a loss worked by hand."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from megatron_parm.data.batches import collate
from megatron_parm.data.sft_pack import Conversations, PackedConversations
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.models.gpt_cases import build, small_shape
from tests.training.runs import flags, run_training

PARTS = [([1, 2, 3, 4, 12], [0, 0, 1, 1, 1]), ([5, 6, 7, 12], [0, 1, 1, 1]), ([8, 9, 12], [0, 0, 1])]


def conversations(parts):
    starts = np.cumsum([0, *(len(ids) for ids, _ in parts)])
    ids, marks = (np.concatenate([np.array(part[place]) for part in parts]) for place in (0, 1))
    return Conversations(ids.astype(np.int32), marks.astype(np.uint8), starts)


def packed(parts, length):
    dataset = PackedConversations(conversations(parts), range(len(parts)), length, 12, None, 0)
    return collate([dataset[number] for number in range(len(dataset))])


class Bigram(nn.Module):
    """The probability that b follows a is 1/2 for b = a + 1, else 1/24 for each of the twelve others."""

    def forward(self, tokens, position_ids, labels, attention_mask):
        return torch.log(torch.where(labels == tokens + 1, 2, 24).double())


def test_the_loss_of_the_answers_is_the_hand_computed_one() -> None:
    """Answers: 2>3 3>4 4>12 | 5>6 6>7 7>12 | 9>12; four of the seven steps are a + 1."""
    batch = packed(PARTS, 10)
    losses = Bigram()(batch["tokens"], batch["position_ids"], batch["labels"], batch["attention_mask"])
    loss = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    assert int(batch["loss_mask"].sum()) == 7
    assert loss.item() == pytest.approx((4 * math.log(2) + 3 * math.log(24)) / 7, rel=1e-12)
    assert loss.item() == pytest.approx(1.7581072, rel=1e-7)


def sums(model, batch):
    """Loss sum over answers and its gradients."""
    model.zero_grad()
    losses = model(batch["tokens"], batch["position_ids"], batch["labels"], batch.get("attention_mask"))
    (losses * batch["loss_mask"]).sum().backward()
    return (losses * batch["loss_mask"]).sum().item(), [parameter.grad.clone() for parameter in model.parameters()]


def test_packed_conversations_train_as_each_alone() -> None:
    model = build(small_shape(), dtype=torch.float64)
    total, gradients = sums(model, packed(PARTS, 12))
    alone = [sums(model, packed([part], 12)) for part in PARTS]
    assert total == pytest.approx(sum(loss for loss, _ in alone), rel=1e-12)
    for place, gradient in enumerate(gradients):
        expected = sum(parts[place] for _, parts in alone)
        torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("broken", ["attention_mask", "position_ids"])
def test_without_the_mask_or_the_positions_it_would_differ(broken) -> None:
    model = build(small_shape(), dtype=torch.float64)
    batch = packed(PARTS, 12)
    right, _ = sums(model, batch)
    if broken == "attention_mask":
        del batch["attention_mask"]
    else:
        batch["position_ids"] = torch.arange(12).expand(1, 12)
    assert sums(model, batch)[0] != pytest.approx(right, rel=1e-6)


def test_a_run_on_conversations_learns_them_the_same_on_every_layout(pools: Pools, tmp_path) -> None:
    lines = [{"prompt": f"{n % 5} 7", "completion": f"{n % 5 + 20} {n % 5}"} for n in range(60)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    more = "--sft --sft-tokenizer-prompt-format identity --train-iters 30 --eval-iters 1 --lr 2e-2"
    argv = flags(str(tmp_path / "chat.jsonl"), more)
    (single,) = pools.run(Layout(1), run_training, argv)
    assert single.error is None, single.error
    losses = single.column("lm_loss")
    assert losses[0] > 3.0 and losses[-1] < 0.8  # 2 of the 3 answer tokens follow from the prompt
    assert "60 conversations" not in single.said and "48 conversations" in single.said
    for layout in (Layout(2, tp=2), Layout(2)):
        for outcome in pools.run(layout, run_training, argv):
            assert outcome.error is None
            assert outcome.column("lm_loss") == pytest.approx(losses, rel=1e-3)
