"""The single-process GPT against Hugging Face's GPT-2 and Llama with the same random weights, and in stages."""

import pytest
import torch
import transformers
from torch import Tensor, nn

from megatron_parm.models.gpt import GPTModel
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
