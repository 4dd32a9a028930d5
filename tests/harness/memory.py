"""How many bytes of activations stay alive: those of every storage that an operator made and nobody has let go."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class KeptBytes(TorchDispatchMode):
    """Within this context the storages of every operator's results are watched, without being kept alive."""

    def __init__(self) -> None:
        super().__init__()
        self._watched: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = function(*args, **(kwargs or {}))
        for result in tree_leaves(results):
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                reference = StorageWeakRef(storage)
                self._watched[reference.cdata] = reference, storage.nbytes()
        return results

    def alive(self, but: Sequence[Tensor] = ()) -> int:
        """Bytes alive now, without the storages of the tensors `but`."""
        left_out = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in but}
        self._watched = {key: found for key, found in self._watched.items() if not found[0].expired()}
        return sum(size for key, (_, size) in self._watched.items() if key not in left_out)


class PeakBytes(KeptBytes):
    """Watches the most bytes that were alive at once, without the storages of the tensors `but`."""

    def __init__(self, but: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._but = tuple(but)
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = super().__torch_dispatch__(function, types, args, kwargs)
        self.peak = max(self.peak, self.alive(self._but))
        return results
