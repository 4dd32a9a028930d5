"""Lets Megatron-Core run on a CPU: what it asks of CUDA is answered for the CPU. Import before anything of megatron.

Patches torch, and in `patch_megatron` the few places of the peer that look at the device; its files stay as they are.
Nothing here is called where there is a GPU.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _Event:
    """A CUDA event that has always happened."""

    def __init__(self, *_args, **_settings):
        pass

    def record(self, *_args):
        pass

    def wait(self, *_args):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, _other):
        return 0.0


class _Stream:
    """The one stream of a CPU: everything has happened when it returns."""

    cuda_stream = 0

    def __init__(self, *_args, **_settings):
        pass

    def wait_stream(self, _stream):
        pass

    def wait_event(self, _event):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def synchronize(self):
        pass


class _Properties:
    major, minor, name, multi_processor_count, total_memory = 0, 0, "cpu", 1, 1 << 34


class ToCpu(TorchFunctionMode):
    """Makes `device="cuda"` mean the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return function(*args, **kwargs)


def patch_torch() -> None:
    """Answer what the peer asks of torch.cuda."""
    only = _Stream()
    answers = {
        "current_device": lambda: CPU,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *_: only,
        "default_stream": lambda *_: only,
        "stream": lambda _: nullcontext(),
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
        "get_device_properties": lambda *_: _Properties,
        "get_device_capability": lambda *_: (0, 0),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
        "manual_seed": torch.manual_seed,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self


def patch_devices() -> TorchFunctionMode:
    """For its optimizer and buffers, which name the device in words and compare the names of tensor types."""
    real = torch.Tensor.type

    def type_of(tensor, *args, **settings):
        if args or settings:
            return real(tensor, *args, **settings)
        return real(tensor).replace("torch.cuda.", "torch.").replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_of
    mode = ToCpu()
    mode.__enter__()
    return mode


def patch_megatron() -> None:
    """The peer's random states are those of the CPU, and the sizes of uneven exchanges reach gloo as numbers."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    if not hasattr(moe_utils, "te_general_gemm"):  # bound only where Transformer Engine can be imported
        moe_utils.te_general_gemm = None

    def to_host(tensor, as_numpy=False, record_stream=False):
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = to_host


def patch_uneven_collectives() -> None:
    """Gloo refuses to gather or scatter slices of unlike sizes, as an expert's input without padding needs: both are
    built on an AlltoAll here, which is faster than gloo's own calls for like sizes."""
    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(outputs, own, group=None, async_op=False):
        if len({output.shape for output in outputs}) == 1:
            return gather(outputs, own, group, async_op)
        counts = [len(output) for output in outputs]
        joined = own.new_empty((sum(counts), *own.shape[1:]))
        dist.all_to_all_single(joined, torch.cat([own] * len(counts)), counts, [len(own)] * len(counts), group=group)
        for output, part in zip(outputs, joined.split(counts), strict=True):
            output.copy_(part)
        return None

    def reduce_scatter(output, inputs, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if len({one.shape for one in inputs}) == 1:
            return scatter(output, inputs, op, group, async_op)
        counts = [len(one) for one in inputs]
        parts = output.new_empty((len(counts) * len(output), *output.shape[1:]))
        dist.all_to_all_single(parts, torch.cat(list(inputs)), [len(output)] * len(counts), counts, group=group)
        output.copy_(parts.unflatten(0, (len(counts), -1)).sum(0) if len(output) else parts)
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


def patch_norm() -> None:
    """torch's norms under sequence parallelism, which the peer refuses; their gradients are summed over tp."""
    from megatron.core.transformer import torch_norm

    def make(_class, config, hidden_size, eps=1e-5, **_settings):
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for weight in norm.parameters():
            weight.sequence_parallel = config.sequence_parallel
        return norm

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(make)
