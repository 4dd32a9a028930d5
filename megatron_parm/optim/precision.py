"""Master weights, and the optimizer that runs on them. Floor 5.

A bfloat16 weight has 8 bits of mantissa: an update below 1/256 of it would be lost. So a 16-bit parameter has a float32
master that the optimizer updates, and is a rounded copy of it. A float32 or float64 parameter is its own master.

With sharded optimizer state (ZeRO-1) a rank has masters and moments of its own part of each parameter only; after an
update the replicas bring the parts together (`gather.py`).
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_parm.errors import CheckpointError
from megatron_parm.grads.buffer import gradient_dtype
from megatron_parm.optim.gather import ParameterGather
from megatron_parm.parallel.sharding import Part, ShardSpec, spec_of


class MasterWeights:
    """The weights that the optimizer updates, by parameter name: whole, or this rank's `parts`.

    Those in `separate` have memory of their own (16-bit parameters, and parts that optimizer kernels could not walk);
    the others are the parameter's.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], parts: Mapping[str, Part] | None = None) -> None:
        self.parameters = dict(parameters)
        self.parts = dict(parts or {})
        self.weights: dict[str, Tensor] = {}
        self.separate: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            dtype = gradient_dtype(parameter.dtype)
            own = self._own(name)
            if parameter.dtype == dtype and own.is_contiguous():
                self.weights[name] = own if name in self.parts else parameter
            else:
                self.weights[name] = own.to(dtype, copy=True, memory_format=torch.contiguous_format)
                self.separate[name] = self.weights[name]

    def spec(self, name: str) -> ShardSpec:
        """Which box of the global tensor the weight is."""
        return replace(spec_of(self.parameters[name]), part=self.parts.get(name))

    @property
    def wide(self) -> dict[str, Tensor]:
        """Masters that know more digits than their parameters, and so belong into a checkpoint."""
        return {name: weight for name, weight in self.separate.items() if weight.dtype != self.parameters[name].dtype}

    @torch.no_grad()
    def publish(self) -> None:
        """Round the separate masters into their parameters: after an update, or after masters were loaded."""
        for name, master in self.separate.items():
            self._own(name).copy_(master)

    @torch.no_grad()
    def refresh(self, *, keep_wide: bool = False) -> None:
        """Set the separate masters to their parameters: after weights came from elsewhere without masters.

        keep_wide: leave those that were loaded themselves.
        """
        for name, master in self.separate.items():
            if not (keep_wide and name in self.wide):
                master.copy_(self._own(name))

    def _own(self, name: str) -> Tensor:
        whole = self.parameters[name].detach()
        return self.parts[name].of(whole) if name in self.parts else whole


class Optimizer:
    """AdamW or SGD on master weights, with its state as named tensors. Built by `build_optimizer`.

    All state exists from the start, so a checkpoint is loaded into the tensors in place. Two runs that start from the
    same weights, state and gradients stay bitwise equal.
    """

    def __init__(
        self,
        kind: str,
        kernel: str,
        masters: MasterWeights,
        torch_optimizer: torch.optim.Optimizer,
        gather: ParameterGather | None = None,
    ) -> None:
        self.kind = kind
        self.kernel = kernel
        self.masters = masters
        self.gather = gather
        self._torch_optimizer = torch_optimizer
        self._num_steps = 0

    def step(self, lr: float, weight_decay: float) -> None:
        """Update the weights from the gradients in the buffers; `weight_decay` is for the parameters that decay."""
        for group in self._torch_optimizer.param_groups:
            group["lr"] = lr * group["rate_factor"]
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self._torch_optimizer.step()
        self._num_steps += 1
        self._publish()

    def settle(self) -> None:
        """Wait until the parameters are whole: before anything but a forward pass reads them. Call on all ranks."""
        if self.gather is not None:
            self.gather.land_all()

    def expect_settled(self) -> None:
        """Check, after a forward pass, that it has waited for every parameter."""
        if self.gather is not None:
            self.gather.expect_landed()

    def _publish(self) -> None:
        self.masters.publish()
        if self.gather is not None:
            self.gather.run()

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """The state by its name, then by parameter.

        Names: exp_avg and exp_avg_sq (AdamW), momentum_buffer (SGD), and master for the 16-bit parameters. Each
        tensor has the shape of its parameter's shard, or of this rank's part of it, and is the live state, not a copy.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for name, weight in self.masters.weights.items():
            for state_name, value in self._torch_optimizer.state[weight].items():
                if state_name != "step":
                    found.setdefault(state_name, {})[name] = value
        if self.masters.wide:
            found["master"] = self.masters.wide
        return found

    def state_scalars(self) -> dict[str, int | str]:
        """What a checkpoint keeps beside the tensors: the kind of optimizer and the number of updates made."""
        return {"kind": self.kind, "step": self._num_steps}

    def load_state_scalars(self, scalars: Mapping[str, object]) -> None:
        """Finish a load: call it after the tensors of `state_tensors` were filled in place.

        Raises CheckpointError if the scalars are not those of this kind of optimizer.
        """
        kind, step = scalars.get("kind"), scalars.get("step")
        if kind != self.kind:
            raise CheckpointError(
                f"the checkpoint holds the state of --optimizer {kind} but the run asks for --optimizer {self.kind}; "
                f"use --optimizer {kind}, or start with fresh optimizer state by --no-load-optim"
            )
        if not isinstance(step, int) or isinstance(step, bool) or step < 0:
            raise CheckpointError(
                f"the optimizer state of the checkpoint has step {step!r}; it must be a count of updates"
            )
        self._num_steps = step
        for state in self._torch_optimizer.state.values():
            if "step" in state:
                state["step"].fill_(step)
        self.masters.refresh(keep_wide=True)
        self._publish()
        self.settle()
