"""The tokenizer of a run as files that transformers reads beside a model. Floor 6."""

import json
from collections.abc import Mapping
from pathlib import Path

from megatron_parm.checkpoint.huggingface_folder import TOKENIZER_FILES
from megatron_parm.config.data import DataConfig

Content = Path | bytes  # a file to copy, or what to write
ABOUT = "tokenizer_config.json"
END = "<|endoftext|>"


def files_of_tokenizer(data: DataConfig, max_length: int) -> Mapping[str, Content]:
    """By name: the files of the settings, where they lie on this machine, and which class of transformers reads them.

    Nothing for a tokenizer that transformers has no class for, and nothing for files that are gone.
    """
    named: dict[str, str | None] = {}
    about: dict[str, object] = {"model_max_length": max_length}
    match data.tokenizer_type:
        case "GPT2BPETokenizer":
            named = {"vocab.json": data.vocab_file, "merges.txt": data.merge_file}
            about |= {"tokenizer_class": "GPT2Tokenizer", "eos_token": END, "bos_token": END, "unk_token": END}
        case "BertWordPieceLowerCase" | "BertWordPieceCase":
            named = {"vocab.txt": data.vocab_file}
            is_lower = data.tokenizer_type == "BertWordPieceLowerCase"
            about |= {"tokenizer_class": "BertTokenizer", "do_lower_case": is_lower}
        case "SentencePieceTokenizer" | "GPTSentencePieceTokenizer" | "Llama2Tokenizer":
            named = {"tokenizer.model": data.tokenizer_model}
            about |= {"tokenizer_class": "LlamaTokenizer"}
        case "HuggingFaceTokenizer" if data.tokenizer_model is not None:
            folder = Path(data.tokenizer_model)
            return {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
    if not named or not all(path is not None and Path(path).is_file() for path in named.values()):
        return {}
    found: dict[str, Content] = {name: Path(str(path)) for name, path in named.items()}
    return found | {ABOUT: (json.dumps(about, indent=2) + "\n").encode()}
