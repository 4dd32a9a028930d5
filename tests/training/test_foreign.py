"""A run that starts from a folder of Hugging Face. Reference: transformers' logits with the same random weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from megatron_parm.checkpoint.huggingface import read_huggingface
from megatron_parm.config.run import resolve
from megatron_parm.errors import CheckpointError
from megatron_parm.models.gpt import GPTModel
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.training.assemble import make_model
from megatron_parm.training.foreign import fill_from_foreign, open_foreign
from megatron_parm.training.resume import model_tensors
from tests.harness.layouts import Layout
from tests.harness.pools import Pools
from tests.models.test_families import LENGTH, WORDS, tokens_of_rows
from tests.models.test_gpt import LOGITS_TOLERANCE
from tests.training.test_convert import convert, their_model

LAYOUTS = [Layout(1), Layout(2, tp=2), Layout(2, ep=2), Layout(2, esp=2)]
FAMILIES = ("GPT-3", "Llama", "Mixtral", "Qwen3-MoE", "OLMoE")


def _fits(name: str, layout: Layout) -> bool:
    return layout.ep * layout.esp == 1 or name not in ("GPT-3", "Llama")


@torch.no_grad()
def _our_logits(ctx: ParallelContext, folder: Path) -> Tensor:
    """[b, s, V] of our model, filled from the folder on the layout of `ctx`."""
    found = open_foreign(folder, ctx)
    assert found is not None
    foreign = found[1]
    config, moe = foreign.config, foreign.config.moe
    parallel = replace(
        config.parallel,
        tensor_model_parallel_size=ctx.tp.size,
        expert_model_parallel_size=ctx.ep.size,
        expert_tensor_parallel_size=ctx.esp.size,
    )
    config = replace(config, parallel=parallel, moe=moe and replace(moe, moe_schedule="s1"))
    built, _, _ = make_model(resolve(config, ctx.world.size), WORDS, ctx)
    fill_from_foreign(foreign, model_tensors(built), WORDS, ctx)
    assert isinstance(built.model, GPTModel)
    logits = built.model.eval()(tokens_of_rows(), torch.arange(LENGTH).expand(3, LENGTH))  # [s, b, V/tp]
    whole = torch.cat(list(transport.gather_stack(logits, ctx.tp)), dim=-1)[..., :WORDS]
    return whole.transpose(0, 1)


@pytest.mark.cover(name=FAMILIES, layout=LAYOUTS, where=_fits)
def test_logits_equal_those_of_the_folder(pools: Pools, tmp_path: Path, name: str, layout: Layout) -> None:
    hf = their_model(name)
    hf.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = hf(input_ids=tokens_of_rows()).logits
    for logits in pools.run(layout, _our_logits, tmp_path / "theirs"):
        assert (logits - expected).abs().max() < LOGITS_TOLERANCE


def test_transformers_reads_what_is_exported(tmp_path: Path) -> None:
    """Without the config.json that came with the weights: the one that our settings make."""
    hf = their_model("Qwen3-MoE")
    hf.save_pretrained(tmp_path / "theirs")
    convert("hf", tmp_path / "theirs", "megatron_parm", tmp_path / "ours")
    convert("megatron_parm", tmp_path / "ours", "hf", tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    with torch.no_grad():
        wanted, found = (model(input_ids=tokens_of_rows()).logits for model in (hf, again))
    assert torch.equal(found, wanted)


def test_a_larger_vocabulary_than_the_folder_has_is_refused(tmp_path: Path) -> None:
    their_model("Llama").save_pretrained(tmp_path / "theirs")
    ctx = ParallelContext.single()
    foreign = read_huggingface(tmp_path / "theirs")
    built, _, _ = make_model(resolve(foreign.config, 1), WORDS + 1, ctx)
    with pytest.raises(CheckpointError, match=f"{WORDS + 1} tokens, the word embedding of --load {WORDS} rows"):
        fill_from_foreign(foreign, model_tensors(built), WORDS + 1, ctx)
