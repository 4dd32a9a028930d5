"""The single-process GPT against Hugging Face's GPT-2 and Llama with the same random weights, and in stages."""

from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatron_parm.models import heads
from megatron_parm.models.gpt import GPTModel
from megatron_parm.parallel.context import ParallelContext
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.layers.parallel_check import TOLERANCE, TP_LAYOUTS, Box, boxes_of, gradient_differences, randomise_vectors
from tests.models.gpt_cases import batch_of, build, fuse, small_shape

# float32 through 2 layers; logits are of order 1
LOGITS_TOLERANCE = 1e-5


def fill(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy `weights` by name; every parameter must be named, the embedding rows beyond the words stay zero."""
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys()
    with torch.no_grad():
        for name, weight in weights.items():
            whole = own[name]
            if weight.shape != whole.shape:
                assert name in ("embedding.word_embeddings.weight", "output_layer.weight")
                whole.zero_()
            whole[: weight.shape[0]].copy_(weight)


def randomise(model: nn.Module) -> nn.Module:
    """Random values in every parameter, biases and norms included."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=0.15).add_(float("ln" in name or "norm" in name) * (weight.dim() == 1))
    return model.eval()


def gpt2_weights(hf: nn.Module, layers: int, heads: int) -> dict[str, Tensor]:
    state = hf.transformer.state_dict()
    found = {
        "embedding.word_embeddings.weight": state["wte.weight"],
        "embedding.position_embeddings.weight": state["wpe.weight"],
        "decoder.final_layernorm.weight": state["ln_f.weight"],
        "decoder.final_layernorm.bias": state["ln_f.bias"],
    }
    names = {
        "input_layernorm": "ln_1",
        "pre_mlp_layernorm": "ln_2",
        "self_attention.linear_proj": "attn.c_proj",
        "mlp.linear_fc1": "mlp.c_fc",
        "mlp.linear_fc2": "mlp.c_proj",
    }
    for layer in range(layers):
        for end in ("weight", "bias"):
            for ours, theirs in names.items():
                found[f"decoder.layers.{layer}.{ours}.{end}"] = state[
                    f"h.{layer}.{theirs}.{end}"
                ].t()  # Conv1D: [in, out]
            qkv = state[f"h.{layer}.attn.c_attn.{end}"].t().chunk(3)
            found[f"decoder.layers.{layer}.self_attention.linear_qkv.{end}"] = fuse(*qkv, heads)
    return found


def llama_weights(hf: nn.Module, layers: int, groups: int) -> dict[str, Tensor]:
    state = hf.state_dict()
    found = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for layer in range(layers):
        theirs, ours = f"model.layers.{layer}", f"decoder.layers.{layer}"
        attention = [state[f"{theirs}.self_attn.{kind}_proj.weight"] for kind in "qkv"]
        gates = [state[f"{theirs}.mlp.{kind}_proj.weight"] for kind in ("gate", "up")]
        found[f"{ours}.self_attention.linear_qkv.weight"] = fuse(*attention, groups)
        found[f"{ours}.self_attention.linear_proj.weight"] = state[f"{theirs}.self_attn.o_proj.weight"]
        found[f"{ours}.mlp.linear_fc1.weight"] = torch.stack(gates)
        found[f"{ours}.mlp.linear_fc2.weight"] = state[f"{theirs}.mlp.down_proj.weight"]
        found[f"{ours}.input_layernorm.weight"] = state[f"{theirs}.input_layernorm.weight"]
        found[f"{ours}.pre_mlp_layernorm.weight"] = state[f"{theirs}.post_attention_layernorm.weight"]
    return found


def gpt2_pair() -> tuple[GPTModel, nn.Module]:
    shape = small_shape(activation="gelu_tanh")
    settings = transformers.GPT2Config(
        vocab_size=13, n_positions=12, n_embd=32, n_layer=2, n_head=4, n_inner=48, bos_token_id=0, eos_token_id=0
    )
    hf = randomise(transformers.GPT2LMHeadModel(settings))
    ours = build(shape)
    fill(ours, gpt2_weights(hf, 2, 4))
    return ours, hf


def llama_pair(is_interleaved: bool = False) -> tuple[GPTModel, nn.Module]:
    settings = transformers.LlamaConfig(
        vocab_size=13, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=12, rms_norm_eps=1e-5, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    hf = randomise(transformers.LlamaForCausalLM(settings))
    shape = small_shape(
        num_query_groups=2, positions="rope", activation="swiglu", normalisation="RMSNorm", has_bias=False,
        has_qkv_bias=False, ties_embeddings=False,
    )  # fmt: skip
    ours = build(shape)
    fill(ours, llama_weights(hf, 2, 2))
    return ours, hf


@pytest.mark.parametrize("pair", [gpt2_pair, llama_pair])
def test_logits_and_loss_equal_hugging_face(pair) -> None:
    ours, hf = pair()
    tokens, position_ids, labels = batch_of(ours.shape)
    expected = hf(input_ids=tokens).logits  # [b, s, V]
    logits = ours(tokens, position_ids)  # [s, b, V]
    torch.testing.assert_close(logits.transpose(0, 1)[..., :13], expected, atol=LOGITS_TOLERANCE, rtol=0)
    loss = ours(tokens, position_ids, labels)
    expected_loss = nn.functional.cross_entropy(expected.transpose(1, 2), labels, reduction="none")
    torch.testing.assert_close(loss, expected_loss, atol=LOGITS_TOLERANCE, rtol=0)


def test_gradient_of_a_tied_embedding_equals_hugging_face() -> None:
    ours, hf = gpt2_pair()
    tokens, position_ids, labels = batch_of(ours.shape)
    ours(tokens, position_ids, labels).mean().backward()
    logits = hf(input_ids=tokens).logits
    nn.functional.cross_entropy(logits.transpose(1, 2), labels).backward()
    gradient = ours.embedding.word_embeddings.weight.grad
    expected = hf.transformer.wte.weight.grad
    torch.testing.assert_close(gradient[:13], expected, atol=1e-6, rtol=1e-4)
    assert not gradient[13:].any(), "padding rows take part"


SHAPES = {
    "gpt2": small_shape(),
    "llama": small_shape(
        positions="rope", activation="swiglu", normalisation="RMSNorm", has_bias=False, has_qkv_bias=False,
        ties_embeddings=False,
    ),
    "qwen3": small_shape(
        num_attention_heads=8, positions="rope", activation="swiglu", normalisation="RMSNorm", has_bias=False,
        has_norm_of_heads=True,
    ),
    "megatron": small_shape(norm_is_zero_centred=True, residual_is_normed=True, has_norm_of_heads=True),
}  # fmt: skip


def run_model(ctx: ParallelContext, name: str, documents: bool = False) -> tuple[Tensor, dict[str, Box]]:
    """Loss [b, s] and every gradient of this rank, with a weight for each token."""
    shape = SHAPES[name]
    model = build(shape, ctx.tp, torch.float64)
    randomise_vectors(model)
    tokens, position_ids, labels = batch_of(shape)
    mask = documents_of_five(3) if documents else None
    loss = model(tokens, position_ids, labels, mask)
    (loss * torch.arange(1.0, 1 + loss.numel()).view(loss.shape)).sum().backward()
    return loss.detach(), boxes_of(model)


def documents_of_five(rows: int) -> Tensor:
    """A mask of documents alone: positions 0-4 and 5-9 do not see each other; the future is left to the model."""
    document = torch.arange(10) // 5
    return (document[:, None] != document).expand(rows, 1, 10, 10)


@pytest.mark.cover(layout=TP_LAYOUTS, name=list(SHAPES), documents=(False, True))
def test_cut_over_tp_equals_one_process(pools: Pools, layout: Layout, name: str, documents: bool) -> None:
    whole, gradients = pools.run(Layout(1), run_model, name, documents)[0]
    parts = pools.run(layout, run_model, name, documents)
    for loss, _ in parts:
        torch.testing.assert_close(loss, whole, atol=TOLERANCE, rtol=0)
    found = gradient_differences(gradients, [boxes for _, boxes in parts[: layout.tp]])
    assert max(found.values()) < TOLERANCE, found


def _without_share(ctx: ParallelContext, name: str) -> tuple[Tensor, dict[str, Box]]:
    def product(hidden: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
        return nn.functional.linear(hidden, weight)

    with patch.object(heads, "column_product", product):
        return run_model(ctx, name)


def test_without_share_before_the_head_gradients_are_wrong(pools: Pools) -> None:
    """The negative control: the loss cannot see it, every gradient below the head does."""
    whole, gradients = pools.run(Layout(1), _without_share, "llama")[0]
    parts = pools.run(Layout(2, tp=2), _without_share, "llama")
    torch.testing.assert_close(parts[0][0], whole, atol=TOLERANCE, rtol=0)
    found = gradient_differences(gradients, [boxes for _, boxes in parts])
    assert found["output_layer.weight"] < TOLERANCE
    del found["output_layer.weight"]
    assert min(found.values()) > 1e-3


def loss_in_float32(ctx: ParallelContext) -> Tensor:
    """Vocabulary 7 with divisor 1: 7 rows on one process, 8 at tp 2 and 4."""
    shape = small_shape(vocab_size=7, padded_vocab_size=-(-7 // ctx.tp.size) * ctx.tp.size)
    return build(shape, ctx.tp)(*batch_of(shape)).detach()


@pytest.mark.parametrize("layout", [Layout(2, tp=2), Layout(4, tp=4)], ids=str)
def test_first_loss_does_not_depend_on_padding_or_tp(pools: Pools, layout: Layout) -> None:
    """FC-33."""
    whole = pools.run(Layout(1), loss_in_float32)[0]
    for loss in pools.run(layout, loss_in_float32):
        torch.testing.assert_close(loss, whole, atol=1e-5, rtol=0)


def loss_with_dropout(ctx: ParallelContext) -> Tensor:
    shape = small_shape(hidden_dropout=0.3)
    return build(shape, ctx.tp, torch.float64)(*batch_of(shape)).detach()


def test_dropout_of_hidden_states_is_the_same_on_tp(pools: Pools) -> None:
    whole = pools.run(Layout(1), loss_with_dropout)[0]
    for loss in pools.run(Layout(2, tp=2), loss_with_dropout):
        torch.testing.assert_close(loss, whole, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_no_position_sees_the_future_or_another_document(name: str, masked: bool) -> None:
    shape = SHAPES[name]
    model = build(shape, dtype=torch.float64)
    tokens, position_ids, _ = batch_of(shape)
    mask = documents_of_five(3) if masked else None
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % shape.vocab_size
    moved = (model(changed, position_ids, None, mask) - model(tokens, position_ids, None, mask)).abs().amax((1, 2))
    assert (moved > 1e-9).tolist() == [False] * 3 + [True] * 2 + [not masked] * 5


def test_parameter_names_are_megatron_cores() -> None:
    layer = [
        "input_layernorm.weight", "self_attention.linear_qkv.weight", "self_attention.linear_proj.weight",
        "pre_mlp_layernorm.weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight",
    ]  # fmt: skip
    expected = {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
    expected |= {f"decoder.layers.{number}.{name}" for number in range(2) for name in layer}
    assert {name for name, _ in build(SHAPES["llama"]).named_parameters()} == expected


def test_a_wrong_shape_is_told_with_its_letters() -> None:
    model = build(SHAPES["gpt2"])
    tokens, position_ids, _ = batch_of(model.shape)
    with pytest.raises(ValueError, match=r"\[b=3, s=10\], found \[3, 9\]"):
        model(tokens[:, :9], position_ids)
