"""GPT as a kind of model. Floor 7."""

from collections.abc import Sequence

from megatron_parm.config.run import RunConfig
from megatron_parm.data.build import GPTDatasets, build_gpt_datasets
from megatron_parm.data.gpt_dataset import DocumentRules
from megatron_parm.data.sft_build import build_sft_datasets
from megatron_parm.models.build import build_gpt
from megatron_parm.tokenizers.base import Tokenizer
from megatron_parm.training.family import ModelFamily, data_paths, data_rules
from megatron_parm.training.objective import NEXT_TOKEN


def gpt_datasets(config: RunConfig, tokenizer: Tokenizer, vocab_size: int, requests: Sequence[int]) -> GPTDatasets:
    """The datasets of a GPT; see `DatasetBuilder`."""
    data = config.data
    needs_eod = data.eod_mask_loss or data.reset_position_ids or data.reset_attention_mask
    documents = DocumentRules(
        eod=tokenizer.eod if needs_eod else None,
        eod_mask_loss=data.eod_mask_loss,
        reset_position_ids=data.reset_position_ids,
        reset_attention_mask=data.reset_attention_mask,
    )
    rules, paths = data_rules(config, vocab_size, documents), data_paths(config)
    if data.sft:
        prompt_format = data.sft_tokenizer_prompt_format
        return build_sft_datasets(paths.whole, paths.by_split, requests, rules, data.split, tokenizer, prompt_format)
    return build_gpt_datasets(paths.whole, requests, rules, data.split, paths.by_split, mock_data=data.mock_data)


GPT = ModelFamily("GPT", build_gpt, gpt_datasets, lambda config: NEXT_TOKEN, is_causal=True)
