"""The random streams of a rank. Floor 3.

Two streams: `replicated` draws the same numbers on the ranks of a tp group (they hold the same activations) and others
on each dp and pp coordinate; the device's default generator is the sharded stream, different on every rank, for dropout
inside tensor-parallel regions (attention probabilities). Both are saved in a checkpoint, so a resumed run draws on.
"""

import hashlib

import torch
from torch import Tensor

from megatron_parm.parallel.context import ParallelContext


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from the given parts, the same on every machine and in every process."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class RandomStates:
    """The streams of this rank, seeded from `seed` and the rank's place. Seeds the default generator too."""

    def __init__(self, seed: int, ctx: ParallelContext) -> None:
        self._device = ctx.device
        self.replicated = torch.Generator(ctx.device)
        self.replicated.manual_seed(derive_seed(seed, "replicated", ctx.pp.rank, ctx.dp.rank))
        torch.manual_seed(derive_seed(seed, "sharded", ctx.rank))

    def state_dict(self) -> dict[str, Tensor]:
        """The state of each stream, as uint8 tensors on the host."""
        return {"replicated": self.replicated.get_state(), "sharded": self._default_state()}

    def load_state_dict(self, states: dict[str, Tensor]) -> None:
        """Continue from states that `state_dict` returned on the same kind of device."""
        self.replicated.set_state(states["replicated"])
        if self._device.type == "cpu":
            torch.set_rng_state(states["sharded"])
        else:
            torch.get_device_module(self._device).set_rng_state(states["sharded"], self._device)

    def _default_state(self) -> Tensor:
        if self._device.type == "cpu":
            return torch.get_rng_state()
        state = torch.get_device_module(self._device).get_rng_state(self._device)
        assert isinstance(state, Tensor)
        return state
