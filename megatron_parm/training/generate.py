"""Sampling text from a trained model. Floor 7.

The whole context is computed anew for every token: simple, exact, and quick enough to look at a model. Every rank
samples from the same logits with the same generator, so tp, ep and esp need no word of what was drawn.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_parm.errors import ConfigError
from megatron_parm.models.gpt import GPTModel
from megatron_parm.parallel.collectives import all_gather


@dataclass(frozen=True)
class SamplingRules:
    """temperature 0: always the likeliest token. top_k 0 and top_p 1: no cut."""

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        for flag, value, is_right, rule in (
            ("--max-new-tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1"),
            ("--temperature", self.temperature, self.temperature >= 0, "0 (greedy) or more"),
            ("--top-k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
        ):
            if not is_right:
                raise ConfigError(f"{flag} {value}: must be {rule}")


@torch.no_grad()
def generate(model: GPTModel, prompt: list[int], num_samples: int, rules: SamplingRules, eod: int) -> list[list[int]]:
    """`num_samples` continuations of `prompt` as token ids, each up to its end of document. Call on all ranks.

    The model sees at most its own number of positions: of a longer text, the end. An empty prompt starts from `eod`.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(rules.seed)
    text = torch.tensor([prompt or [eod]] * num_samples, device=device)  # [b, s]
    start = text.shape[1]
    ended = torch.zeros(num_samples, dtype=torch.bool, device=device)
    for _ in range(rules.max_new_tokens):
        drawn = _draw(_last_logits(model, text[:, -model.shape.max_positions :]), rules, generator)  # [b]
        text = torch.cat([text, drawn.unsqueeze(1)], dim=1)  # [b, s + 1]  what follows an end is cut away below
        ended |= drawn == eod
        if ended.all():
            break
    return [_until(row, eod) for row in text[:, start:].tolist()]


def _last_logits(model: GPTModel, text: Tensor) -> Tensor:
    """Logits of the next token: `[b, vocabulary]` on the host, in float32."""
    positions = torch.arange(text.shape[1], device=text.device).expand_as(text)
    logits = model(text, positions)[-1]  # [b, V/tp]
    whole = all_gather(logits.float(), model.tp, 1)  # [b, V]
    return whole[:, : model.shape.vocab_size].cpu()


def _draw(logits: Tensor, rules: SamplingRules, generator: torch.Generator) -> Tensor:
    if rules.temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / rules.temperature
    if rules.top_k:
        least = logits.topk(min(rules.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if rules.top_p < 1:
        ordered, order = logits.softmax(dim=-1).sort(descending=True, dim=-1)
        is_beyond = ordered.cumsum(dim=-1) - ordered >= rules.top_p  # the first token is always kept
        logits = logits.masked_fill(is_beyond.gather(-1, order.argsort(dim=-1)), -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator).squeeze(1)


def _until(row: list[int], eod: int) -> list[int]:
    return row[: row.index(eod)] if eod in row else row
