"""Compares the training step of our dense GPT with a peer's, in one process and in one run. Floor 8.

    python tools/bench_train_step.py --peer hf
    python tools/bench_train_step.py --peer hf --precision bf16

The steps of both are interleaved, so that a busy machine slows both. A step is forward, backward, clipping and fused
AdamW on the same random tokens; prints the median time, the tokens per second of each, and the ratio (above 1: ours is
faster). With bf16 both keep weights, gradients and moments in it, and no master weights, which the peer does not have.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

from megatron_parm.layers.initialise import initialise_weights
from megatron_parm.models.block import make_feed_forward
from megatron_parm.models.gpt import GPTModel
from megatron_parm.models.shape import ModelShape
from megatron_parm.parallel.context import Axis

CLIP_NORM = 1.0
LEARNING_RATE = 1e-4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """The sizes that both models share."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    batch: int
    vocabulary: int
    dtype: torch.dtype = torch.float32


def our_loss(shape: Shape, device: torch.device) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Our GPT, and its mean loss for tokens [b, s + 1]."""
    model_shape = ModelShape(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=4 * shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.heads,
        head_dim=shape.hidden // shape.heads,
        vocab_size=shape.vocabulary,
        padded_vocab_size=-(-shape.vocabulary // 128) * 128,
        max_positions=shape.sequence,
        activation="gelu_tanh",
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    tp = Axis.single("tp")
    dtype = shape.dtype
    model = GPTModel(
        model_shape,
        lambda layer: make_feed_forward(model_shape, tp=tp, dtype=dtype, device=device),
        tp=tp,
        generator=torch.Generator(device),
        dtype=dtype,
        device=device,
    )
    initialise_weights(model, seed=1)
    position_ids = torch.arange(shape.sequence, device=device).expand(shape.batch, shape.sequence)
    return model, lambda text: model(text[:, :-1], position_ids, text[:, 1:]).mean()


def hugging_face_loss(shape: Shape, device: torch.device) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Hugging Face's GPT-2 with scaled_dot_product_attention, and its mean loss for tokens [b, s + 1]."""
    import transformers

    settings = transformers.GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.sequence,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(settings)
    model.set_attn_implementation("sdpa")
    nn.Module.to(model, device, shape.dtype)

    def loss(text: Tensor) -> Tensor:
        # given as `shift_labels` the next words are taken as they are: a loss for each of the s positions, as ours
        following = text[:, 1:].contiguous()
        found = model(input_ids=text[:, :-1], labels=following, shift_labels=following).loss
        assert isinstance(found, Tensor)
        return found

    return model, loss


PEERS = {"hf": hugging_face_loss}


def step_of(model: nn.Module, loss_of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], float]:
    """One whole training step of `model`; returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(text: Tensor) -> float:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(text)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        return loss.item()

    return step


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=sorted(PEERS), default="hf", help="model to compare with (default hf)")
    for name, default in (("layers", 12), ("hidden-size", 256), ("heads", 4), ("sequence", 256), ("batch", 8)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--vocab-size", type=int, default=50257, help="words of both models (default 50257)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of each model (default 10)")
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="of both models (default fp32)")
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")
    parser.add_argument("--profile", action="store_true", help="print where the time of one step of each goes")
    return parser.parse_args()


def profile(name: str, step: Callable[[Tensor], float], text: Tensor) -> None:
    """Print the operators of one step by their own time."""
    with torch.profiler.profile() as recorded:
        step(text)
    print(f"{name}\n{recorded.key_averages().table(sort_by='self_cpu_time_total', row_limit=25)}")


def main() -> None:
    """Time both and print the ratio."""
    arguments = parse_arguments()
    shape = Shape(
        arguments.layers,
        arguments.hidden_size,
        arguments.heads,
        arguments.sequence,
        arguments.batch,
        arguments.vocab_size,
        DTYPES[arguments.precision],
    )
    device = torch.device(arguments.device)
    torch.manual_seed(1)
    steps = {
        name: step_of(*make(shape, device))
        for name, make in (("ours", our_loss), (arguments.peer, PEERS[arguments.peer]))
    }
    text = torch.randint(0, shape.vocabulary, (shape.batch, shape.sequence + 1), device=device)
    for step in steps.values():
        for _ in range(2):
            step(text)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.steps):
        for name, step in steps.items():
            start = time.perf_counter()
            step(text)
            times[name].append(time.perf_counter() - start)
    tokens = shape.batch * shape.sequence
    for name, taken in times.items():
        typical = median(taken)
        print(
            f"{name:>5}: {1e3 * typical:.1f} ms a step (best {1e3 * min(taken):.1f}), {tokens / typical:.0f} tokens/s"
        )
    ours, peer = (median(times[name]) for name in ("ours", arguments.peer))
    print(f"ours / {arguments.peer}: {peer / ours:.3f}x tokens/s (median of {arguments.steps} interleaved steps)")
    if arguments.profile:
        for name, step in steps.items():
            profile(name, step, text)


if __name__ == "__main__":
    main()
