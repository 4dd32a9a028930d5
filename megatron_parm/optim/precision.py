"""Master weights, and the optimizer that runs on them. Floor 5.

A bfloat16 weight has 8 bits of mantissa: an update below 1/256 of it would be lost. So a 16-bit parameter has a float32
master that the optimizer updates, and is a rounded copy of it. A float32 or float64 parameter is its own master.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megatron_parm.errors import CheckpointError
from megatron_parm.grads.buffer import gradient_dtype


class MasterWeights:
    """The weights that the optimizer updates, by parameter name; those of 16-bit parameters are `separate`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.weights: dict[str, Tensor] = {}
        self.separate: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            dtype = gradient_dtype(parameter.dtype)
            self.weights[name] = parameter if parameter.dtype == dtype else parameter.detach().to(dtype)
            if self.weights[name] is not parameter:
                self.separate[name] = self.weights[name]

    @torch.no_grad()
    def publish(self) -> None:
        """Round the separate masters into their parameters: after an update, or after masters were loaded."""
        for name, master in self.separate.items():
            self.parameters[name].copy_(master)

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the separate masters to their parameters: after weights came from elsewhere without masters."""
        for name, master in self.separate.items():
            master.copy_(self.parameters[name])


class Optimizer:
    """AdamW or SGD on master weights, with its state as named tensors. Built by `build_optimizer`.

    All state exists from the start, so a checkpoint is loaded into the tensors in place. Two runs that start from the
    same weights, state and gradients stay bitwise equal.
    """

    def __init__(self, kind: str, kernel: str, masters: MasterWeights, torch_optimizer: torch.optim.Optimizer) -> None:
        self.kind = kind
        self.kernel = kernel
        self.masters = masters
        self._torch_optimizer = torch_optimizer
        self._num_steps = 0

    def step(self, lr: float, weight_decay: float) -> None:
        """Update the weights from the gradients in the buffers; `weight_decay` is for the parameters that decay."""
        for group in self._torch_optimizer.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay if group["decays"] else 0.0
        self._torch_optimizer.step()
        self._num_steps += 1
        self.masters.publish()

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """The state by its name, then by parameter.

        Names: exp_avg and exp_avg_sq (AdamW), momentum_buffer (SGD), and master for the 16-bit parameters. Each
        tensor has the shape of its parameter's shard and is the live state, not a copy.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for name, weight in self.masters.weights.items():
            for state_name, value in self._torch_optimizer.state[weight].items():
                if state_name != "step":
                    found.setdefault(state_name, {})[name] = value
        if self.masters.separate:
            found["master"] = dict(self.masters.separate)
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
        self.masters.publish()
