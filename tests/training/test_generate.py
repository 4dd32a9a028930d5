"""Sampling. References: argmax of full forwards, probabilities of a softmax, one process for every layout."""

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_parm.config.parser import parse_run_config
from megatron_parm.config.run import check_run, resolve
from megatron_parm.errors import ConfigError
from megatron_parm.layers.past import Past
from megatron_parm.models.gpt import GPTModel
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training import generate as generate_module
from megatron_parm.training.assemble import make_model
from megatron_parm.training.generate import SamplingRules, generate
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.training.runs import MOE, flags

EOD = 30
WORDS = 31
GREEDY = SamplingRules(max_new_tokens=12, temperature=0.0)


def _model(ctx: ParallelContext, more: str = "") -> GPTModel:
    config, _ = parse_run_config(flags("unread", MOE, "--moe-expert-capacity-factor -1 --moe-schedule baseline", more))
    check_run(config, ctx.world.size)
    return make_model(resolve(config, ctx.world.size), WORDS, ctx)[0].model


def _generate(ctx: ParallelContext, prompt: list[int], rules: SamplingRules, more: str) -> list[list[int]]:
    return generate(_model(ctx, more), [prompt] * 3, rules, EOD)


def test_greedy_is_the_argmax_of_the_last_logits_also_beyond_the_positions() -> None:
    """12 tokens after 3 are more than the model's 8 positions: it sees the last 8."""
    model = _model(ParallelContext.single()).eval()
    text = [3, 4, 5]
    for _ in range(12):
        seen = torch.tensor([text[-8:]])
        with torch.no_grad():
            logits = model(seen, torch.arange(seen.shape[1]).unsqueeze(0))[-1, 0, :WORDS]
        text.append(int(logits.argmax()))
    (found,) = generate(model, [[3, 4, 5]], GREEDY, EOD)
    assert found == (text[3:] if EOD not in text[3:] else text[3 : text.index(EOD)])


PROMPTS = [[3, 4, 5], [7], [1, 2, 3, 4, 5, 6], []]
KINDS = ["", "--position-embedding-type rope --num-query-groups 2", "--position-embedding-type rope --window-size 2,0"]


@pytest.mark.parametrize("more", KINDS)
def test_what_is_kept_gives_the_tokens_of_a_full_computation(more: str) -> None:
    """Prompts of other lengths beside it, padded in front, change no text; 12 tokens outgrow the 8 positions."""
    model = _model(ParallelContext.single(), f"{more} --init-method-std 0.4").eval()
    kept = generate(model, PROMPTS, GREEDY, EOD)
    assert kept == generate(model, PROMPTS, GREEDY, EOD, keeps_past=False)
    assert kept == [generate(model, [prompt], GREEDY, EOD, keeps_past=False)[0] for prompt in PROMPTS]
    assert len({tuple(text) for text in kept}) > 1


def test_control_a_padding_that_is_seen_changes_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(ParallelContext.single(), "--position-embedding-type rope --init-method-std 0.4").eval()
    right = generate(model, PROMPTS, GREEDY, EOD)
    aligned = generate_module._aligned
    monkeypatch.setattr(
        generate_module, "_aligned", lambda *given: (aligned(*given)[0], torch.zeros(4, dtype=torch.int64))
    )
    assert generate(model, PROMPTS, GREEDY, EOD) != right


def test_one_more_token_costs_one_row() -> None:
    model = Scripted([0.0, 1.0], max_positions=9)
    generate(model, [[1, 1, 1]], SamplingRules(5), eod=0)  # type: ignore[arg-type]
    assert [len(row) for row in model.shown] == [3, 1, 1, 1, 1]


@pytest.mark.parametrize("rules", [GREEDY, SamplingRules(max_new_tokens=12, temperature=1.3, top_k=9, top_p=0.9)])
@pytest.mark.parametrize(
    "layout", [Layout(2, tp=2), Layout(2, ep=2), Layout(4, tp=2, ep=2), Layout(4, tp=2, esp=2, ep=2)], ids=str
)
def test_every_layout_says_the_same(pools: Pools, layout: Layout, rules: SamplingRules) -> None:
    sizes = (
        f"--tensor-model-parallel-size {layout.tp} --expert-model-parallel-size {layout.ep} "
        f"--expert-tensor-parallel-size {layout.esp}"
    )
    (alone,) = pools.run(Layout(1), _generate, [3, 4, 5], rules, "")
    assert pools.run(layout, _generate, [3, 4, 5], rules, sizes) == [alone] * layout.world
    assert (alone[0] == alone[1]) == (rules.temperature == 0)


class Scripted(nn.Module):
    """A model whose next word has given probabilities, whatever came before; notes what it was shown."""

    def __init__(self, probabilities: list[float], max_positions: int = 4) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(probabilities).log())
        self.shape = type("Shape", (), {"max_positions": max_positions, "vocab_size": len(probabilities)})()
        self.tp = ParallelContext.single().tp
        self.shown: list[list[int]] = []

    def forward(
        self, tokens: Tensor, positions: Tensor, labels: None, mask: Tensor | None, *, past: Past | None
    ) -> Tensor:
        self.shown.append(tokens[0].tolist())
        padding = torch.full((2,), 50.0)  # rows that pad the vocabulary are never drawn
        return torch.cat([self.logits, padding]).expand(tokens.shape[1], tokens.shape[0], -1)


def _drawn(probabilities: list[float], rules: SamplingRules, count: int = 4000) -> list[float]:
    """Shares of the words among `count` draws."""
    model = Scripted(probabilities)
    words = [row[0] for row in generate(model, [[0]] * count, rules, eod=99)]  # type: ignore[arg-type]
    return [words.count(word) / count for word in range(len(probabilities))]


@pytest.mark.parametrize(
    ("rules", "wanted"),
    [
        (SamplingRules(1), [0.5, 0.2, 0.2, 0.1]),
        (SamplingRules(1, temperature=0.5), [25 / 34, 4 / 34, 4 / 34, 1 / 34]),
        (SamplingRules(1, top_k=1), [1, 0, 0, 0]),
        (SamplingRules(1, top_k=99), [0.5, 0.2, 0.2, 0.1]),
        (SamplingRules(1, top_p=0.5), [1, 0, 0, 0]),
        (SamplingRules(1, top_p=0.95), [0.5, 0.2, 0.2, 0.1]),
        (SamplingRules(1, top_p=0.9), [5 / 9, 2 / 9, 2 / 9, 0]),
        (SamplingRules(1, temperature=0.0), [1, 0, 0, 0]),
    ],
)
def test_draws_follow_the_rules(rules: SamplingRules, wanted: list[float]) -> None:
    """Four standard deviations of 4000 draws are 0.032; what is cut away is never drawn."""
    shares = _drawn([0.5, 0.2, 0.2, 0.1], rules)
    assert shares == pytest.approx(wanted, abs=0.032)
    assert all(share == 0 for share, want in zip(shares, wanted, strict=True) if want == 0)


def test_the_seed_decides() -> None:
    def text(seed: int) -> list[list[int]]:
        model = Scripted([0.25] * 4)
        return generate(model, [[0]] * 2, SamplingRules(20, seed=seed), eod=99)  # type: ignore[arg-type]

    assert text(1) == text(1) != text(2)


def test_a_sample_ends_before_its_end_of_document_and_the_others_go_on() -> None:
    model = Scripted([0.2, 0.8])
    samples = generate(model, [[0]] * 50, SamplingRules(30), eod=0)  # type: ignore[arg-type]
    assert all(0 not in sample for sample in samples)
    lengths = [len(sample) for sample in samples]
    assert 0 in lengths and max(lengths) > 8
    only_end = Scripted([1.0, 0.0])
    assert generate(only_end, [[1]] * 2, SamplingRules(30), eod=0) == [[], []]  # type: ignore[arg-type]
    assert len(only_end.shown) == 1, "it goes on after all samples have ended"


def test_an_empty_prompt_starts_from_the_end_of_document() -> None:
    model = Scripted([0.0, 1.0])
    assert generate(model, [[]], SamplingRules(6), eod=0, keeps_past=False) == [[1] * 6]  # type: ignore[arg-type]
    assert model.shown[0] == [0] and model.shown[-1] == [1] * 4


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"temperature": -0.1}, "--temperature -0.1"),
        ({"temperature": math.nan}, "--temperature nan"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"top_p": 1.5}, "--top-p 1.5"),
    ],
)
def test_rules_that_cannot_be_followed_name_the_flag(values: dict[str, float], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        SamplingRules(**values)  # type: ignore[arg-type]


def test_padding_is_cut_before_anything_is_drawn() -> None:
    text, padding = torch.tensor([[0, 1]]), torch.tensor([0])
    logits = generate_module._last_logits(Scripted([0.5, 0.5]), text, padding)  # type: ignore[arg-type]
    assert logits.shape == (1, 2)
