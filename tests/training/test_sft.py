"""Training on conversations (--sft). Reference: each conversation alone in a model, and a loss worked by hand."""

import json
import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from megatron_parm.data.batches import collate
from megatron_parm.data.sft_pack import Conversations, PackedConversations
from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.models.gpt_cases import build, small_shape
from tests.training.runs import MOE, Event, Text, flags, make_trainer, run_training, same_bits

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


@pytest.fixture
def chats(tmp_path):
    """A file of sixty short conversations, some shorter than others, so that samples end in padding."""
    lines = [{"prompt": f"{n % 5} 7", "completion": f"{n % 5 + 20} {n % 5}" + " 3" * (n % 3)} for n in range(60)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "chat.jsonl")


SFT = "--sft --sft-tokenizer-prompt-format identity --eval-iters 1 --lr 2e-2 --precision fp64"


def test_a_run_on_conversations_learns_them(pools: Pools, chats) -> None:
    (outcome,) = pools.run(Layout(1), run_training, flags(chats, SFT, "--train-iters 30"))
    assert outcome.error is None, outcome.error
    losses = outcome.column("lm_loss")
    assert losses[0] > 3.0 and losses[-1] < 1.2  # most answer tokens follow from the prompt
    assert "60 conversations" not in outcome.said and "48 conversations" in outcome.said


LAYOUTS = [
    (Layout(2, tp=2), "s1", "--sequence-parallel"),
    (Layout(2, pp=2), "baseline", ""),
    (Layout(4, ep=2, esp=2), "s1", ""),
    (Layout(4, tp=2, pp=2), "s2", ""),
]


@pytest.fixture(scope="module")
def alone():
    return {}


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: "-".join(map(str, row)))
def test_conversations_train_experts_the_same_on_every_layout(pools: Pools, chats, alone, row) -> None:
    layout, schedule, more = row
    argv = flags(chats, SFT, MOE)
    if not alone:
        (alone["run"],) = pools.run(Layout(1), run_training, argv)
        assert alone["run"].error is None, alone["run"].error
    sizes = (
        f"--tensor-model-parallel-size {layout.tp} --expert-model-parallel-size {layout.ep} "
        f"--expert-tensor-parallel-size {layout.esp} --pipeline-model-parallel-size {layout.pp}"
    )
    for outcome in pools.run(layout, run_training, [*argv, *f"{sizes} --moe-schedule {schedule} {more}".split()]):
        assert outcome.error is None, outcome.error
        for name in ("lm_loss", "load_balancing_loss", "grad_norm"):
            assert outcome.column(name) == pytest.approx(alone["run"].column(name), rel=1e-10)
        assert outcome.column("lm_loss", "valid") == pytest.approx(alone["run"].column("lm_loss", "valid"), rel=1e-10)


def run_padded(ctx: ParallelContext, argv, pad, is_seen):
    """A step on samples padded with `pad`; is_seen: nobody is told which tokens are padding."""

    @contextmanager
    def fault(_rank):
        packed_sample = PackedConversations.__getitem__

        def padded(self, number):
            sample = packed_sample(self, number)
            sample["tokens"][~sample["is_text"]] = pad
            if is_seen:
                del sample["is_text"]
            return sample

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PackedConversations, "__getitem__", padded)
            yield

    return run_training(ctx, argv, fault)


def test_what_stands_at_padding_changes_nothing_of_the_experts(pools: Pools, chats) -> None:
    """FC-21: not the loss, not the balance loss, no figure of the router, not one bit of any weight."""
    argv = flags(chats, SFT, MOE, "--moe-expert-capacity-factor 1 --train-iters 2")
    first, second, seen = (
        pools.run(Layout(1), run_padded, argv, pad, is_seen)[0] for pad, is_seen in ((30, False), (4, False), (4, True))
    )
    assert first.error is None, first.error
    for name in ("lm_loss", "load_balancing_loss", "grad_norm", "moe"):
        assert first.column(name) == second.column(name) != seen.column(name)
    assert same_bits(first.state, second.state) == [] != same_bits(first.state, seen.state)


def test_a_run_counts_the_answers_alone_by_hand(tmp_path) -> None:
    """A model that gives 20 the probability 1/2, 21 1/4 and each of the 29 other words 1/116, whatever came before.

    Answers are 20, 21 and the end: (ln 2 + ln 4 + ln 116) / 3. The question's second number would add another ln 116.
    """
    lines = [{"prompt": f"{n % 20} 7 ", "completion": "20 21"} for n in range(60)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)))
    more = "--sft --sft-tokenizer-prompt-format identity --train-iters 1 --untie-embeddings-and-output-weights"
    events: list[Event] = []
    trainer = make_trainer(ParallelContext.single(), flags(f"{tmp_path}/chat.jsonl", more), events, Text())
    weights = dict(trainer.run.built.model.named_parameters())
    with torch.no_grad():
        for weight in weights.values():
            weight.zero_()
        weights["decoder.final_layernorm.bias"][0] = 1
        weights["output_layer.weight"][:, 0] = -math.log(116)
        weights["output_layer.weight"][20, 0], weights["output_layer.weight"][21, 0] = -math.log(2), -math.log(4)
    trainer.run.optimizer.masters.refresh()
    trainer.train()
    (loss,) = [event["lm_loss"] for event in events if event["event"] == "train"]
    assert loss == pytest.approx((math.log(2) + math.log(4) + math.log(116)) / 3, rel=1e-6)
    assert loss == pytest.approx(2.2776772, rel=1e-6)
