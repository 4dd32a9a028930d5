"""Reference: sums done by hand, Megatron's closed formula, and torch's own operation counter on a real block."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear, silu
from torch.utils.flop_counter import FlopCounterMode

from megatron_parm.observe.flops import (
    TransformerShape,
    attention_flops,
    feed_forward_flops,
    throughput,
    training_flops_per_iteration,
    training_flops_per_token,
)

# h=8, f=48 (not 4h), 2 heads of 4, one query group, s=16, V=100, two layers
DENSE = TransformerShape(2, 8, 48, 2, 1, 4, 16, 100)


def test_a_dense_token_by_hand():
    # q: 2*8*8 = 128, k and v: 2*(2*8*4) = 128, out: 2*8*8 = 128; scores and values: 2 * (2*8*16)/2 = 256
    assert attention_flops(DENSE) == 128 + 128 + 128 + 256
    # two matrices: 2 * 2*8*48 = 1536
    assert feed_forward_flops(DENSE, 48) == 1536
    # 3 * (2 * (640 + 1536) + 2*8*100)
    assert training_flops_per_token(DENSE) == 3 * (2 * 2176 + 1600) == 17856
    assert training_flops_per_iteration(DENSE, global_batch_size=4) == 17856 * 16 * 4


def test_the_cost_follows_the_feed_forward_width():
    """FC-39: the width is taken as given, not assumed to be four times hidden."""
    narrow = replace(DENSE, ffn_hidden_size=32)
    difference = training_flops_per_token(DENSE) - training_flops_per_token(narrow)
    assert difference == 3 * 2 * (2 * 2 * 8 * 16)


def test_an_moe_layer_counts_its_active_experts():
    # one of two layers: k=2 gated experts of width 24: 2 * (3 * 2*8*24) = 2304 forward; the dense one 3 * 2*8*48 = 2304
    moe = replace(DENSE, is_gated=True, num_moe_layers=1, moe_ffn_hidden_size=24, moe_topk=2)
    assert training_flops_per_token(moe) == 3 * (2 * 640 + 2304 + 2304 + 1600)


def test_an_moe_layer_counts_its_shared_expert_and_its_gate():
    # the expert of every token, width 5: 2 matrices * 2*8*5 = 160; its gate 2*8 = 16; k=2 experts of 24: 2 * 2*2*8*24
    moe = replace(DENSE, num_moe_layers=2, moe_ffn_hidden_size=24, moe_topk=2)
    with_shared = replace(moe, shared_expert_size=5, weighs_shared_expert=True)
    assert training_flops_per_token(with_shared) == 3 * (2 * (640 + 1536 + 160 + 16) + 1600)
    assert training_flops_per_token(with_shared) - training_flops_per_token(moe) == 3 * 2 * (160 + 16)
    ungated = replace(with_shared, weighs_shared_expert=False)
    assert training_flops_per_token(with_shared) - training_flops_per_token(ungated) == 3 * 2 * 16


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("window", [0, 3, 14])
def test_a_window_counts_the_positions_inside_it(is_causal, window):
    seen = [sum(key >= query - window and (key <= query or not is_causal) for key in range(16)) for query in range(16)]
    shape = replace(DENSE, window=window, is_causal=is_causal)
    assert attention_flops(shape) == 384 + 2 * 2 * 8 * sum(seen) / 16


def test_a_window_as_long_as_the_sequence_is_none():
    assert attention_flops(replace(DENSE, window=15)) == attention_flops(DENSE)


def test_the_word_head_of_a_bert_counts():
    # one h x h product: 2*8*8
    assert training_flops_per_token(replace(DENSE, has_word_head=True)) - training_flops_per_token(DENSE) == 3 * 128


def test_two_way_attention_counts_the_whole_score_matrix():
    assert attention_flops(replace(DENSE, is_causal=False)) - attention_flops(DENSE) == 256


def megatron_formula(b, s, layers, h, f, heads, groups, head_size, v, topk, is_gated):
    """Megatron-Core 0.12, where every layer is of one kind."""
    ratio = heads * head_size / h
    gated = 1.5 if is_gated else 1.0
    attention = (1 + groups / heads + s / h / 2) * ratio
    return 12 * b * s * layers * h * h * (attention + f / h * topk * gated + v / (2 * layers * h))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("topk", [1, 2])
def test_megatrons_closed_formula(is_gated, topk):
    shape = TransformerShape(12, 768, 3072, 12, 4, 64, 1024, 50304, is_gated, True, 12, 3072, topk)
    expected = megatron_formula(8, 1024, 12, 768, 3072, 12, 4, 64, 50304, topk, is_gated)
    assert training_flops_per_iteration(shape, 8) == pytest.approx(expected, rel=1e-12)


def test_torch_counts_the_same_for_a_real_block():
    """Two-way attention written as plain products, since the counter does not halve causal attention."""
    s, b, h, f, heads, d, v = 16, 2, 8, 48, 2, 4, 100
    shape = TransformerShape(1, h, f, heads, heads, d, s, v, is_gated=True, is_causal=False)
    x = torch.randn(b, s, h, requires_grad=True)
    weights = [torch.randn(rows, columns, requires_grad=True) for rows, columns in
               ((3 * h, h), (h, h), (2 * f, h), (h, f), (v, h))]  # fmt: skip
    with FlopCounterMode(display=False) as counter:
        q, k, value = (t.view(b, s, heads, d).transpose(1, 2) for t in linear(x, weights[0]).chunk(3, -1))
        context = (q @ k.transpose(-1, -2)).softmax(-1) @ value
        y = linear(context.transpose(1, 2).reshape(b, s, h), weights[1])
        gate, up = linear(y, weights[2]).chunk(2, -1)
        linear(linear(silu(gate) * up, weights[3]), weights[4]).sum().backward()
    assert counter.get_total_flops() == training_flops_per_iteration(shape, b)


def test_throughput_units():
    """FC-39: samples/s = batch / time, tokens/s = that x sequence, tera = 10^12, job and device apart."""
    speed = throughput(DENSE, global_batch_size=8, iteration_time_ms=500.0, world_size=4)
    assert speed.samples_per_second == 16.0
    assert speed.tokens_per_second == 256.0
    assert speed.tflops_per_second == pytest.approx(17856 * 256 / 1e12, rel=1e-12)
    assert speed.tflops_per_second_per_device == speed.tflops_per_second / 4
