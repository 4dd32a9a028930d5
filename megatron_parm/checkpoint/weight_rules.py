"""How tensors of another program become ours and back: joined, turned, with their rows in another order. Floor 6.

A `Rule` has both directions, so what is read can be written again bit for bit. Tables of rules are in
`huggingface_names.py` and `megatron_names.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from megatron_parm.checkpoint.tensor_files import TensorInfo, TensorSource, names
from megatron_parm.errors import CheckpointError


@dataclass(frozen=True)
class Heads:
    """The heads of an attention, and how many of keys and values."""

    queries: int
    groups: int


Join = Callable[[Sequence[Tensor], Heads], Tensor]  # theirs -> ours
Part = Callable[[Tensor, Heads], Sequence[Tensor]]  # ours -> theirs


@dataclass(frozen=True)
class Rule:
    """Their tensors that make one of ours. `{layer}` and `{expert}` in a name stand for numbers."""

    theirs: tuple[str, ...]
    join: Join
    part: Part


@dataclass(frozen=True)
class Link:
    """A rule with the numbers filled in."""

    ours: str
    rule: Rule


def fuse(tensors: Sequence[Tensor], heads: Heads) -> Tensor:
    """Rows of q, k and v in our order: for each group its query heads, then its key, then its value."""
    return torch.cat([part.reshape(heads.groups, -1, *part.shape[1:]) for part in tensors], dim=1).flatten(0, 1)


def unfuse(fused: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of q, k and v of our fused tensor."""
    queries = heads.queries // heads.groups
    rows = fused.unflatten(0, (heads.groups, queries + 2, -1))  # type: ignore[no-untyped-call]  # [groups, q + 2, d, ...]
    query, key, value = rows.split([queries, 1, 1], dim=1)
    return query.flatten(0, 2), key.flatten(0, 2), value.flatten(0, 2)


def same(theirs: str) -> Rule:
    """The same tensor under another name."""
    return Rule((theirs,), lambda tensors, heads: tensors[0], lambda ours, heads: [ours])


def turned(theirs: str) -> Rule:
    """A matrix kept as [in, out]."""
    return Rule((theirs,), lambda tensors, heads: tensors[0].t(), lambda ours, heads: [ours.t()])


def fused(*theirs: str) -> Rule:
    """Queries, keys and values in three tensors."""
    return Rule(theirs, fuse, unfuse)


def fused_in_one(theirs: str, *, is_turned: bool) -> Rule:
    """All queries, then all keys, then all values in one tensor."""

    def turn(tensor: Tensor) -> Tensor:
        return tensor.t() if is_turned else tensor

    return Rule(
        (theirs,),
        lambda tensors, heads: fuse(turn(tensors[0]).chunk(3), heads),
        lambda ours, heads: [turn(torch.cat(unfuse(ours, heads)))],
    )


def stacked(*theirs: str) -> Rule:
    """Tensors of one shape: gate and up of a gated feed-forward."""
    return Rule(theirs, lambda tensors, heads: torch.stack(list(tensors)), lambda ours, heads: ours.unbind(0))


def _join_experts(count: int) -> Join:
    def join(tensors: Sequence[Tensor], heads: Heads) -> Tensor:
        whole = torch.stack(list(tensors))
        if count == 1:
            return whole
        return whole.unflatten(0, (-1, count))  # type: ignore[no-untyped-call,no-any-return]  # [E, count, ...]

    return join


def _part_experts(count: int) -> Part:
    return lambda ours, heads: (ours if count == 1 else ours.flatten(0, 1)).unbind(0)


def of_experts(*theirs: str) -> Rule:
    """Each expert's tensors under names of their own; `{expert}` is in each."""
    return Rule(theirs, _join_experts(len(theirs)), _part_experts(len(theirs)))


def with_ends(ours: str, theirs: str, make: Callable[[str], Rule] = same) -> dict[str, Rule]:
    """Weight and bias of one module. `make` may be `turned`, which does nothing to a bias."""
    return {f"{ours}.{end}": (same if end == "bias" else make)(f"{theirs}.{end}") for end in ("weight", "bias")}


def filled(table: Mapping[str, Rule], num_experts: int = 0, layer: int | None = None) -> Iterator[Link]:
    """The rules of a table with the number of a layer and those of all experts filled in."""
    for ours, rule in table.items():
        theirs = [name if layer is None else name.replace("{layer}", str(layer)) for name in rule.theirs]
        if any("{expert}" in name for name in theirs):
            theirs = [name.replace("{expert}", str(expert)) for expert in range(num_experts) for name in theirs]
        yield Link(ours if layer is None else ours.replace("{layer}", str(layer)), replace(rule, theirs=tuple(theirs)))


def _joined(rule: Rule, theirs: Sequence[Tensor], heads: Heads) -> Sequence[Tensor]:
    return [rule.join(theirs, heads)]


def _outline(action: Callable[[], Sequence[Tensor]], what: str) -> list[TensorInfo]:
    try:
        return [TensorInfo.of(tensor) for tensor in action()]
    except (RuntimeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{what}: the shapes do not fit the settings of the model ({error})") from None


class OursFromTheirs:
    """Their tensors under our names. Raises CheckpointError for one that is missing and for one that has no place."""

    def __init__(self, theirs: TensorSource, links: Sequence[Link], heads: Heads, where: str) -> None:
        self._theirs, self._heads = theirs, heads
        self._links: dict[str, Link] = {}
        entries: dict[str, TensorInfo] = {}
        used: set[str] = set()
        for link in links:
            present = [name for name in link.rule.theirs if name in theirs.entries]
            if not present:
                continue
            if len(present) < len(link.rule.theirs):
                missing = names(set(link.rule.theirs) - set(present))
                raise CheckpointError(f"{where}: {link.ours} is made of {missing} too; only {names(present)} is there")
            used.update(present)
            outlines = [theirs.entries[name].outline for name in present]
            made = _outline(partial(_joined, link.rule, outlines, heads), f"{where}: {link.ours}")
            entries[link.ours] = made[0]
            self._links[link.ours] = link
        left = theirs.entries.keys() - used
        if left:
            raise CheckpointError(f"{len(left)} tensors have no place in {where}: {names(left)}")
        self._entries = entries

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """Every tensor by our name."""
        return self._entries

    def read(self, name: str) -> Tensor:
        """One of ours, made of theirs."""
        rule = self._links[name].rule
        return rule.join([self._theirs.read(theirs) for theirs in rule.theirs], self._heads)


class TheirsFromOurs:
    """Our tensors under their names. Raises CheckpointError for a tensor of ours that has no place there.

    Theirs are in the order of ours, and the last one of ours is kept, so that reading in order reads each once.
    """

    def __init__(self, ours: TensorSource, links: Sequence[Link], heads: Heads, where: str) -> None:
        self._ours, self._heads = ours, heads
        self._places: dict[str, tuple[Link, int]] = {}
        self._entries: dict[str, TensorInfo] = {}
        self._last: tuple[str, Sequence[Tensor]] = "", ()
        used = set()
        for link in links:
            if link.ours not in ours.entries:
                continue
            used.add(link.ours)
            outline = ours.entries[link.ours].outline
            made = _outline(partial(link.rule.part, outline, heads), f"{where}: {link.ours}")
            if len(made) != len(link.rule.theirs):
                raise CheckpointError(
                    f"{where}: {link.ours} {ours.entries[link.ours]} makes {len(made)} tensors, "
                    f"the settings speak of {len(link.rule.theirs)}"
                )
            for place, (name, info) in enumerate(zip(link.rule.theirs, made, strict=True)):
                self._places[name], self._entries[name] = (link, place), info
        left = ours.entries.keys() - used
        if left:
            raise CheckpointError(f"{where}: {len(left)} tensors have no place in the other format: {names(left)}")

    @property
    def entries(self) -> Mapping[str, TensorInfo]:
        """Every tensor by their name."""
        return self._entries

    def read(self, name: str) -> Tensor:
        """One of theirs, cut out of ours."""
        link, place = self._places[name]
        if self._last[0] != link.ours:
            self._last = link.ours, link.rule.part(self._ours.read(link.ours), self._heads)
        return self._last[1][place].contiguous()
