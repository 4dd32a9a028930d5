"""What only a classifier of texts has. Floor 1."""

from dataclasses import dataclass

from megatron_parm.config.fields import flag


@dataclass(frozen=True, kw_only=True)
class ClassifyConfig:
    """Classification of texts, flags of finetune_bert.py alone."""

    class_names: tuple[str, ...] = flag(
        (), help="the classes, two or more, as the files write them; the first is number 0"
    )
    classifier_dropout: float = flag(0.1, help="dropout before the classification head", at_least=0, below=1)
