"""Sampling text from a trained model. Floor 7.

Keys and values of what was read are kept, so one more token costs one row, until a text outgrows the model's
positions: from then on its end is computed anew for every token. Texts of a batch end at one column; before a shorter
one stands padding, which nothing attends to. Every rank samples from the same logits with the same generator, so tp, ep
and esp need no word of what was drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_parm.errors import ConfigError
from megatron_parm.layers.past import Past
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
def generate(
    model: GPTModel, prompts: Sequence[Sequence[int]], rules: SamplingRules, eod: int, *, keeps_past: bool = True
) -> list[list[int]]:
    """A continuation of each of `prompts` as token ids, up to its end of document. Call on all ranks.

    The model sees at most its own number of positions: of a longer text, the end. An empty prompt starts from `eod`.
    `keeps_past` False computes the whole context anew for every token, for the same result.
    """
    model.eval()
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(rules.seed)
    text, padding = _aligned([list(prompt) or [eod] for prompt in prompts], eod, device)  # [b, s], [b]
    start, most = text.shape[1], model.shape.max_positions
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    past = Past(most) if keeps_past else None
    for step in range(rules.max_new_tokens):
        width = text.shape[1]
        if past is not None and width <= most:
            logits = _last_logits(model, text, padding, past, 0 if step == 0 else width - 1)
        else:  # the window moves, and with it every position
            logits = _last_logits(model, text[:, -most:], (padding - max(width - most, 0)).clamp(min=0))
        drawn = _draw(logits, rules, generator).to(device)  # [b]
        text = torch.cat([text, drawn.unsqueeze(1)], dim=1)  # [b, s + 1]  what follows an end is cut away below
        ended |= drawn == eod
        if ended.all():
            break
    return [_until(row, eod) for row in text[:, start:].tolist()]


def _aligned(prompts: list[list[int]], filler: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The prompts ending at one column, and the columns of padding before each."""
    width = max(map(len, prompts))
    rows = [[filler] * (width - len(prompt)) + prompt for prompt in prompts]
    return torch.tensor(rows, device=device), torch.tensor([width - len(prompt) for prompt in prompts], device=device)


def _last_logits(model: GPTModel, text: Tensor, padding: Tensor, past: Past | None = None, first: int = 0) -> Tensor:
    """Logits of the next token: `[b, vocabulary]` on the host, in float32. `past` has the columns before `first`."""
    columns = torch.arange(text.shape[1], device=text.device)
    positions = (columns - padding.unsqueeze(1)).clamp(min=0)  # [b, s]
    mask = None
    if past is not None or bool(padding.any()):
        is_hidden = (columns > columns[:, None]) | (columns < padding[:, None, None])  # [b, s, s]
        is_hidden = is_hidden & (columns != columns[:, None])  # padding sees itself, for a softmax needs something
        mask = is_hidden[:, None, first:]  # [b, 1, s - first, s]
    logits = model(text[:, first:], positions[:, first:], None, mask, past=past)[-1]  # [b, V/tp]
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
