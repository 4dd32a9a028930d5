"""The bias that balances. References: the rule by hand, and that it does balance."""

from dataclasses import replace

import torch

from megatron_parm.moe.balance import update_expert_biases
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.sharding import saved_tensors
from tests.moe.test_gate import EXPERTS, SETTINGS, make_gate, make_tokens

BIASED = replace(
    SETTINGS, score_function="sigmoid", has_expert_bias=True, capacity_factor=None, balance_coefficient=None
)


def test_the_crowded_lose_and_the_idle_gain_by_hand() -> None:
    """Counts 6, 2, 4 of mean 4: -rate, +rate, and exactly nothing at the mean."""
    gate, record = make_gate(BIASED)
    gate(make_tokens())
    summary = record.summarise(ParallelContext.single(), 2)
    assert summary is not None
    counts = summary.counts[0].clone()
    counts[:] = 4
    counts[0], counts[1] = 6, 2
    update_expert_biases([gate], replace(summary, counts=counts.unsqueeze(0)), 0.25)
    assert gate.expert_bias is not None
    assert gate.expert_bias.tolist() == [-0.25, 0.25] + [0.0] * (EXPERTS - 2)


def test_loads_even_out_without_any_loss() -> None:
    """On fixed tokens the fullest expert's load falls from 1.33 of the mean to within a tenth of it, or nearly."""
    gate, record = make_gate(BIASED)
    loads = []
    for _ in range(200):
        record.clear()
        gate(make_tokens(256))
        summary = record.summarise(ParallelContext.single(), 2)
        assert summary is not None
        loads.append(summary.max_load)
        update_expert_biases([gate], summary, 0.01)
    assert loads[0] > 1.3 and max(loads[-10:]) < 1.12


def test_the_bias_is_float32_in_a_bf16_model_and_is_saved() -> None:
    """FC-29: an update of 1e-3 on a bias of 1 is lost in bf16."""
    gate, _ = make_gate(BIASED, torch.bfloat16)
    assert gate.expert_bias is not None and gate.expert_bias.dtype == torch.float32
    assert set(saved_tensors(gate)) == {"weight", "expert_bias"}
    gate.expert_bias += 1.0
    before = gate.expert_bias.clone()
    gate.expert_bias += 1e-3
    assert not torch.equal(before, gate.expert_bias)
    assert set(saved_tensors(make_gate(SETTINGS)[0])) == {"weight"}, "a router without one saves nothing more"
