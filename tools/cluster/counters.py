"""Bytes that passed the links of an emulated cluster, as the kernel counted them.

Counted are frames as they enter a link: payload, one header for each piece that TCP sends (66 bytes on some 18 KB), and
acknowledgements. A rank reads its own at any moment with `own_traffic`; the tool reads all of them at the end.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.cluster.network import run_iproute
from tools.cluster.topology import INTER_LINK, RANK_LINK, Cluster

INTERFACES = Path("/proc/net/dev")


@dataclass(frozen=True)
class LinkBytes:
    """What a link carried away from its rank or node, and to it."""

    sent: int
    received: int

    def __sub__(self, earlier: "LinkBytes") -> "LinkBytes":
        return LinkBytes(self.sent - earlier.sent, self.received - earlier.received)


@dataclass(frozen=True)
class RankTraffic:
    """A rank's whole link, and the part of it that went to and came from other nodes."""

    link: LinkBytes
    inter: LinkBytes

    @property
    def intra(self) -> LinkBytes:
        """The part that stayed inside the node."""
        return self.link - self.inter

    def __sub__(self, earlier: "RankTraffic") -> "RankTraffic":
        return RankTraffic(self.link - earlier.link, self.inter - earlier.inter)


@dataclass(frozen=True)
class ClusterTraffic:
    """Every rank's link and every node's uplink, by rank and by node."""

    ranks: tuple[RankTraffic, ...]
    uplinks: tuple[LinkBytes, ...]


def own_traffic(interfaces: Path = INTERFACES) -> RankTraffic | None:
    """What the calling rank's link has carried so far; None outside an emulated cluster.

    Two calls and a subtraction count what lies between them. A send that has returned may still lie in the socket's
    buffer and is counted when it leaves, so let all ranks meet in a collective before each call.
    """
    try:
        counted = parse_interfaces(interfaces.read_text())
    except OSError:
        return None
    return RankTraffic(counted[RANK_LINK], counted[INTER_LINK]) if INTER_LINK in counted else None


def parse_interfaces(text: str) -> dict[str, LinkBytes]:
    """The kernel's table /proc/net/dev, by interface."""
    rows = (line.partition(":") for line in text.splitlines() if ":" in line)
    fields = {name.strip(): numbers.split() for name, _, numbers in rows}
    return {name: LinkBytes(sent=int(row[8]), received=int(row[0])) for name, row in fields.items()}


def read_traffic(cluster: Cluster) -> ClusterTraffic:
    """What every link has carried so far; called while the namespaces exist."""
    ranks = []
    for rank in range(cluster.world):
        counted = _links(cluster.namespace(rank))
        ranks.append(RankTraffic(counted[RANK_LINK], counted[INTER_LINK]))
    ports = _links(cluster.switch)
    uplinks = [ports[f"up{node}"] for node in range(cluster.nodes)] if cluster.nodes > 1 else []
    return ClusterTraffic(tuple(ranks), tuple(uplinks))


def _links(namespace: str) -> dict[str, LinkBytes]:
    shown = json.loads(run_iproute(["ip", "-n", namespace, "-s", "-j", "link", "show"]))
    return {
        link["ifname"]: LinkBytes(sent=link["stats64"]["tx"]["bytes"], received=link["stats64"]["rx"]["bytes"])
        for link in shown
    }


def as_table(cluster: Cluster, traffic: ClusterTraffic) -> str:
    """The counters for the eye, in MB."""
    lines = ["MB on the links      sent  received   of it between nodes: sent  received"]
    for rank, counted in enumerate(traffic.ranks):
        name = f"rank {rank} (node {cluster.node_of(rank)})"
        whole, inter = counted.link, counted.inter
        lines.append(
            f"{name:<17}{whole.sent / 1e6:8.2f}{whole.received / 1e6:10.2f}"
            f"{inter.sent / 1e6:27.2f}{inter.received / 1e6:10.2f}"
        )
    for node, uplink in enumerate(traffic.uplinks):
        lines.append(f"{f'node {node} uplink':<17}{uplink.sent / 1e6:8.2f}{uplink.received / 1e6:10.2f}")
    return "\n".join(lines)


def as_json(cluster: Cluster, traffic: ClusterTraffic, facts: Mapping[str, object]) -> str:
    """The counters for a program, in bytes, with `facts` of the run."""
    ranks = [
        {"rank": rank, "node": cluster.node_of(rank), **asdict(counted)} for rank, counted in enumerate(traffic.ranks)
    ]
    uplinks = [{"node": node, **asdict(uplink)} for node, uplink in enumerate(traffic.uplinks)]
    described = {
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "intra_bits_per_second": cluster.intra.bits,
        "inter_bits_per_second": cluster.inter.bits,
    }
    return json.dumps({**described, **facts, "ranks": ranks, "uplinks": uplinks}, indent=1)
