"""Rows that carry a token once to each node that holds one of its experts, and the steps of s1n on them. Floor 5.

A row is `[h + m]`: the token, then its weights for the node's m = E / nodes experts, `ABSENT` for those it does not go
to. The rows of a chunk are sorted by node, then by token. Where they land, experts read the tokens they were chosen
for, and their outputs are weighted and added at once, so the way back too has one row a token and node. A chunk is a
run of tokens. All splits follow from the announced loads, so no step waits for numbers.

With distinct experts drawn evenly, a token reaches N (1 - C(E - E/N, k) / C(E, k)) of N nodes instead of k experts.
Source: parm.md section 2, "further ideas".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron_parm.moe.buckets import Buckets, Packed
from megatron_parm.moe.packed_steps import add_copies, replicate
from megatron_parm.moe.routing import Routing
from megatron_parm.parallel import transport
from megatron_parm.parallel.context import ParallelContext
from megatron_parm.parallel.overlapped import AllToAllUneven, Pending, start

ABSENT = -1.0  # in place of a weight; weights are never negative


@dataclass(frozen=True)
class Loads:
    """What a rank of ep_esp sends of one chunk.

    Rows to each node; how many of the rows to its node each rank of ep has experts for; choices of each expert.
    """

    to_node: tuple[int, ...]
    to_owner: tuple[int, ...]
    choices: tuple[int, ...]


@dataclass(frozen=True)
class NodeRows:
    """The rows of one chunk of `num_tokens` tokens of this rank. `everyone`: the loads of each rank of ep_esp.

    `token`: for each row sent, the place of its token in the chunk. `fan`: for each row passed on inside the node, its
    place among those that came there; None where all are passed on as they are.
    """

    rows: Tensor
    everyone: tuple[Loads, ...]
    num_tokens: int
    token: Tensor
    fan: Tensor | None = None


@dataclass(frozen=True)
class _Place:
    """Where a rank stands: the node, and on it the rank of ep (`owner`), among `shards` of esp."""

    ctx: ParallelContext

    @property
    def shards(self) -> int:
        return self.ctx.esp.size

    @property
    def owners(self) -> int:
        """Ranks of ep on a node."""
        return self.ctx.inside.size // self.shards

    @property
    def owner(self) -> int:
        return self.ctx.inside.rank // self.shards

    def came_to(self, place: int, everyone: Sequence[Loads]) -> list[Loads]:
        """The loads of the ranks, one a node, that send between nodes to the rank at `place` of this node."""
        return [everyone[node * self.ctx.inside.size + place] for node in range(self.ctx.between.size)]

    def between_splits(self, everyone: Sequence[Loads]) -> tuple[list[int], list[int]]:
        """Rows that this rank sends to each node, and those that it receives from each."""
        came = self.came_to(self.ctx.inside.rank, everyone)
        return list(everyone[self.ctx.ep_esp.rank].to_node), [load.to_node[self.ctx.between.rank] for load in came]

    def inside_splits(self, everyone: Sequence[Loads]) -> tuple[list[int], list[int]]:
        """Rows that this rank passes on to each rank of its node, and those that each passes on to it."""
        first = self.ctx.between.rank * self.owners  # of the ranks of ep on this node

        def passed(place: int, owner: int) -> int:
            return sum(load.to_owner[first + owner] for load in self.came_to(place, everyone))

        peers, me = range(self.ctx.inside.size), self.ctx.inside.rank
        return [passed(me, peer // self.shards) for peer in peers], [passed(peer, self.owner) for peer in peers]


def carry(tokens: Tensor, routing: Routing, ctx: ParallelContext, chunks: int) -> list[NodeRows]:
    """The rows of tokens `[n, h]`, by chunks, once all ranks of ep_esp have told their loads."""
    table = _weight_table(tokens, routing)  # [n, E]
    tables = table.tensor_split(chunks)
    told = transport.gather_stack(torch.stack([_count_loads(part, ctx) for part in tables]), ctx.ep_esp)
    everyone = told.transpose(0, 1).tolist()  # [chunks][ep_esp][nodes + ep + E]
    return [
        _carry_chunk(part, weights, tuple(_as_loads(row, ctx) for row in rows), ctx)
        for part, weights, rows in zip(tokens.tensor_split(chunks), tables, everyone, strict=True)
    ]


def _weight_table(tokens: Tensor, routing: Routing) -> Tensor:
    """`[n, E]`: the weights of the kept choices, ABSENT elsewhere."""
    num_experts = routing.counts.shape[0]
    expert = torch.where(routing.kept, routing.expert, num_experts)
    table = tokens.new_full((tokens.shape[0], num_experts + 1), ABSENT)
    return table.scatter(1, expert, routing.weight.to(tokens.dtype))[:, :num_experts]


def _count_loads(table: Tensor, ctx: ParallelContext) -> Tensor:
    chosen = table.detach() >= 0
    rows = [_any_of(chosen, parts).sum(0) for parts in (ctx.between.size, ctx.ep.size)]
    return torch.cat([*rows, chosen.sum(0)])


def _any_of(chosen: Tensor, parts: int) -> Tensor:
    """`[n, experts]` -> `[n, parts]`: whether any expert of each equal part was chosen."""
    return chosen.view(chosen.shape[0], parts, chosen.shape[1] // parts).any(2)


def _as_loads(row: Sequence[int], ctx: ParallelContext) -> Loads:
    nodes, owners = ctx.between.size, ctx.ep.size
    return Loads(tuple(row[:nodes]), tuple(row[nodes : nodes + owners]), tuple(row[nodes + owners :]))


def _carry_chunk(tokens: Tensor, table: Tensor, everyone: tuple[Loads, ...], ctx: ParallelContext) -> NodeRows:
    num_rows = sum(everyone[ctx.ep_esp.rank].to_node)
    goes = _any_of(table.detach() >= 0, ctx.between.size)  # [n, nodes]
    node, token = torch.nonzero_static(goes.t(), size=num_rows).unbind(1)
    weights = table.unflatten(1, (ctx.between.size, -1))[token, node]  # type: ignore[no-untyped-call]  # [r, m]
    rows = torch.cat([tokens.index_select(0, token), weights], dim=1)  # [r, h + m]
    return NodeRows(rows, everyone, tokens.shape[0], token)


def node_send(part: NodeRows, ctx: ParallelContext) -> Pending[NodeRows]:
    """AlltoAll between nodes, to the rank at this rank's place on each: one copy a token and node."""
    send, receive = _Place(ctx).between_splits(part.everyone)
    return start(part.rows, AllToAllUneven(ctx.between, send, receive)).then(lambda rows: replace(part, rows=rows))


def node_return(part: NodeRows, ctx: ParallelContext) -> Pending[NodeRows]:
    """AlltoAll between nodes back: a row for each that `node_send` took away."""
    send, receive = _Place(ctx).between_splits(part.everyone)
    return start(part.rows, AllToAllUneven(ctx.between, receive, send)).then(lambda rows: replace(part, rows=rows))


def node_spread(part: NodeRows, ctx: ParallelContext) -> Pending[NodeRows]:
    """AlltoAll inside the node: each row to all shards of the ranks of ep that it has experts on."""
    place = _Place(ctx)
    send, receive = place.inside_splits(part.everyone)
    rows, fan = part.rows, None
    if place.owners > 1:
        num_local = len(part.everyone[0].choices) // ctx.between.size
        goes = _any_of(rows.detach()[:, -num_local:].contiguous() >= 0, place.owners)  # [r, owners]
        fan = torch.nonzero_static(goes.t(), size=sum(send[:: place.shards]))[:, 1]
        rows = rows.index_select(0, fan)
    copies = replicate(rows, send[:: place.shards], place.shards)
    flight = start(copies, AllToAllUneven(ctx.inside, send, receive))
    return flight.then(lambda arrived: replace(part, rows=arrived, fan=fan))


def node_collect(part: NodeRows, ctx: ParallelContext) -> Pending[NodeRows]:
    """AlltoAll inside the node back, then the sum of the shards' parts and of the ranks of ep: a row for each that came
    into the node to this rank."""
    place = _Place(ctx)
    send, receive = place.inside_splits(part.everyone)
    num_rows = sum(place.between_splits(part.everyone)[1])

    def add(copies: Tensor) -> NodeRows:
        rows = add_copies(copies, send[:: place.shards], place.shards)
        if part.fan is not None:
            rows = rows.new_zeros(num_rows, rows.shape[1]).index_add(0, part.fan, rows)
        return replace(part, rows=rows)

    return start(part.rows, AllToAllUneven(ctx.inside, receive, send)).then(add)


def settle(parts: Sequence[NodeRows]) -> Tensor:
    """The rows that came back, added into their tokens: `[n, h]`. A token without a kept choice gets zeros."""
    chunks = [
        part.rows.new_zeros(part.num_tokens, part.rows.shape[1]).index_add(0, part.token, part.rows) for part in parts
    ]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


def weigh(experts: Callable[[Buckets], Buckets], part: NodeRows, ctx: ParallelContext) -> NodeRows:
    """This rank's part of each row's weighted sum over its experts here: `[r, h + m]` -> `[r, h]`."""
    choices = _choices_here(part, ctx)
    num_rows, width = part.rows.shape
    hidden = width - len(part.everyone[0].choices) // ctx.between.size
    first = hidden + _Place(ctx).owner * len(choices)  # the column of this rank's first expert
    chosen = part.rows.detach()[:, first : first + len(choices)] >= 0
    expert, row = torch.nonzero_static(chosen.t(), size=sum(choices)).unbind(1)
    taken = _Take.apply(part.rows, row, expert + first, hidden)  # type: ignore[no-untyped-call]
    outputs = experts(Packed(taken[0], (choices,)))
    assert isinstance(outputs, Packed)
    weighted = outputs.rows * taken[1].unsqueeze(1)  # [choices, h]
    return replace(part, rows=weighted.new_zeros(num_rows, hidden).index_add(0, row, weighted))


def _choices_here(part: NodeRows, ctx: ParallelContext) -> tuple[int, ...]:
    """Choices of each expert of this rank."""
    each = len(part.everyone[0].choices) // ctx.ep.size
    mine = range(ctx.ep.rank * each, (ctx.ep.rank + 1) * each)
    return tuple(sum(load.choices[expert] for load in part.everyone) for expert in mine)


class _Take(Function):
    """The features of `row` and the weight at (`row`, `column`), whose gradients fill one tensor."""

    @staticmethod
    def forward(saved: Any, rows: Tensor, row: Tensor, column: Tensor, hidden: int) -> tuple[Tensor, Tensor]:
        saved.save_for_backward(row, column)
        saved.shape = rows.shape
        return rows[:, :hidden].index_select(0, row), rows[row, column]

    @staticmethod
    @once_differentiable
    def backward(saved: Any, features: Tensor, weights: Tensor) -> tuple[Tensor | None, ...]:
        row, column = saved.saved_tensors
        gradient = features.new_zeros(saved.shape)
        gradient[:, : features.shape[1]].index_add_(0, row, features)
        gradient[row, column] = weights
        return gradient, None, None, None
