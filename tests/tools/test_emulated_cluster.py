"""The emulated cluster. References: the commands' meaning by hand for small sizes; torchrun's variables; the configured
rates and the bytes sent, in real runs on 2 x 2 ranks (these need root and iproute2, as the tool does).
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.cluster import counters, network, topology
from tools.cluster.topology import Cluster, parse_rate
from tools.emulated_cluster import main

ROOT = Path(__file__).parents[2]
PROBE = Path(__file__).with_name("link_probe.py")
real = pytest.mark.usefixtures("can_emulate")

TWO_BY_TWO = Cluster("7-9", 2, 2, parse_rate("1gbit"), parse_rate("300mbit"))
ONE_NODE = Cluster("7-9", 1, 2, parse_rate("1gbit"), parse_rate("300mbit"))


@pytest.mark.parametrize(
    ("text", "bits"),
    [("1gbit", 10**9), ("300mbit", 3 * 10**8), ("1.5Gbit", 15 * 10**8), ("64kbit", 64_000), ("8000bit", 8000)],
)
def test_rates(text: str, bits: int) -> None:
    assert parse_rate(text).bits == bits


@pytest.mark.parametrize("text", ["1", "1gb", "-1gbit", "0mbit", "7kbit", "1gbit x", "", "1gbps", "nangbit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ValueError, match="write 1gbit"):
        parse_rate(text)


def test_names_and_addresses() -> None:
    assert TWO_BY_TWO.namespaces() == [
        "emulated-cluster-7-9-switch",
        *(f"emulated-cluster-7-9-rank{rank}" for rank in range(4)),
    ]
    assert [TWO_BY_TWO.address(rank) for rank in range(4)] == ["10.77.0.1", "10.77.0.2", "10.77.1.1", "10.77.1.2"]
    wires = {TWO_BY_TWO.wire_address(rank, link) for rank in range(4) for link in ("eth0", "inter0")}
    assert len(wires) == 8 and all(int(wire[:2], 16) & 3 == 2 for wire in wires)  # local, no multicast


def test_every_port_stands_in_its_bridge() -> None:
    lines = list(topology.switch_lines(TWO_BY_TWO))
    made = [line.split()[2] for line in lines if " type " in line and line.startswith("link add")]
    assert made == ["node0", "node1", "spine", "r0", "r1", "r2", "r3", "up0", "up1"]
    masters = dict(
        line.removeprefix("link set ").removesuffix(" up").split(" master ") for line in lines if "master" in line
    )
    assert masters == {
        **{"r0": "node0", "r1": "node0", "r2": "node1", "r3": "node1"},
        **{"up0": "node0", "up1": "node1", "down0": "spine", "down1": "spine"},
    }
    far_ends = [line.partition(" peer ")[2].split() for line in lines if " peer name eth0 " in line]
    assert [end[end.index("netns") + 1] for end in far_ends] == TWO_BY_TWO.namespaces()[1:]


def test_every_direction_of_every_link_is_limited() -> None:
    limits = {line.split()[3]: line.split()[7] for line in topology.switch_buckets(TWO_BY_TWO)}
    own = {line.split()[3]: line.split()[7] for line in topology.rank_buckets(TWO_BY_TWO)}
    assert own == {"eth0": "1000000000bit"}
    assert limits == {
        **dict.fromkeys(["r0", "r1", "r2", "r3"], "1000000000bit"),
        **dict.fromkeys(["up0", "down0", "up1", "down1"], "300000000bit"),
    }
    assert topology.bucket("x", parse_rate("1gbit")).endswith("rate 1000000000bit burst 25000 limit 67108864")
    assert " burst 20000 " in topology.bucket("x", parse_rate("300mbit"))  # at least one of TCP's pieces


def test_other_nodes_are_reached_over_the_counted_interface() -> None:
    lines = list(topology.rank_lines(TWO_BY_TWO, 1))
    ways = {
        words[2]: words[words.index("dev") + 1] for line in lines if (words := line.split())[0] in ("neigh", "route")
    }
    assert ways == {
        **{"10.77.0.0/24": "eth0", "10.77.0.0/16": "inter0"},
        **{"10.77.0.1": "eth0", "10.77.1.1": "inter0", "10.77.1.2": "inter0"},
    }
    assert f"neigh add 10.77.1.2 lladdr {TWO_BY_TWO.wire_address(3, 'inter0')} dev inter0 nud permanent" in lines


def test_one_node_has_no_spine() -> None:
    assert not any(word in line for line in topology.switch_lines(ONE_NODE) for word in ("spine", "up0", "down0"))
    assert [line.split()[3] for line in topology.switch_buckets(ONE_NODE)] == ["r0", "r1"]


def test_the_environment_is_torchruns() -> None:
    told = topology.rank_environment(TWO_BY_TWO, 3)
    wanted = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    wanted |= {"GROUP_WORLD_SIZE": "2", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1"}
    assert wanted.items() <= told.items() and told["GLOO_SOCKET_IFNAME"] == "eth0"


def test_own_traffic_is_read_from_the_kernels_table(tmp_path: Path) -> None:
    head = "Inter-|   Receive                            |  Transmit\n face |bytes    packets|bytes\n"
    table = tmp_path / "dev"
    row = "{}: {} 73 0 0 0 0 0 0 {} 2 0 0 0 0 0 0\n"
    table.write_text(
        head + row.format("    lo", 5, 5) + row.format("  eth0", 900, 700) + row.format("inter0", 300, 200)
    )
    found = counters.own_traffic(table)
    assert found is not None
    assert (found.link.sent, found.link.received, found.inter.sent, found.inter.received) == (700, 900, 200, 300)
    assert (found.intra.sent, found.intra.received) == (500, 600)
    table.write_text(head + row.format("  eth0", 900, 700))
    assert counters.own_traffic(table) is None  # an ordinary machine


def test_what_is_missing_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["--", "x.py"]) == 2
    assert "needs root" in capsys.readouterr().err
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["--", "x.py"]) == 2
    text = capsys.readouterr().err
    assert "ip and tc cannot be found: apt-get install iproute2" in text and text.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--nodes 0 -- x.py", "from 1 to 64"),
        ("--intra fast -- x.py", "no rate"),
        ("--timeout -1 -- x.py", "number of seconds"),
        ("--nodes 2 --", "no script given"),
    ],
)
def test_wrong_command_lines(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags.split())
    assert stopped.value.code == 2 and message in capsys.readouterr().err


def start(logs: Path, *arguments: str | Path) -> "subprocess.Popen[str]":
    command = [sys.executable, ROOT / "tools" / "emulated_cluster.py", "--log-dir", logs, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def names() -> set[str]:
    return (
        {path.name for path in network.NAMESPACES.glob("emulated-cluster-*")} if network.NAMESPACES.exists() else set()
    )


def names_of(tool: "subprocess.Popen[str]") -> set[str]:
    return {name for name in names() if name.startswith(f"emulated-cluster-{tool.pid}-")}


def pids(folder: Path, ranks: int) -> list[int]:
    """The process ids that the ranks wrote, once all have."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = [path.read_text().strip() for path in sorted(folder.glob("pid*"))]
        if len(found) == ranks and all(found):
            return [int(text) for text in found]
        time.sleep(0.05)
    raise AssertionError("the ranks did not start")


def left_behind(folder: Path) -> list[int]:
    """The process ids of what the ranks of `WAITING` leave behind."""
    return [int(path.read_text()) for path in folder.glob("behind*")]


def is_gone(pid: int) -> bool:
    """Whether a process that was killed has ended; the kernel takes a moment."""
    until = time.monotonic() + 5
    while network.start_time(pid) is not None and time.monotonic() < until:
        time.sleep(0.02)
    return network.start_time(pid) is None


def host_network() -> str:
    shown = [
        subprocess.run(["ip", *what], capture_output=True, text=True, check=True)
        for what in (["-br", "link"], ["route"])
    ]
    return "".join(done.stdout for done in shown)


@pytest.fixture(scope="module")
def can_emulate() -> None:
    missing = network.what_is_missing()
    if missing:
        pytest.skip(f"no emulated cluster: {missing}")


@pytest.fixture
def tools() -> Iterator["list[subprocess.Popen[str]]"]:
    """Tools started by a test; ended after it whatever happened."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for tool in started:
        if tool.poll() is None:
            tool.terminate()
            tool.communicate(timeout=60)


@real
def test_rates_bytes_and_environment_of_a_real_run(tmp_path: Path) -> None:
    intra, inter, rounds = 2_500_000, 1_000_000, 3
    before = host_network()
    figures = tmp_path / "out" / "counters.json"
    rates = ("--intra", "200mbit", "--inter", "100mbit")
    sizes = (str(intra), str(inter), str(rounds))
    tool = start(
        tmp_path, "--nodes", "2", "--ranks-per-node", "2", *rates, "--counters", figures, "--", PROBE, tmp_path, *sizes
    )
    out, err = tool.communicate(timeout=120)
    assert tool.returncode == 0, out + err
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]

    for rank, told in enumerate(seen):
        assert (
            topology.rank_environment(TWO_BY_TWO, rank).items() - {("TORCHELASTIC_RUN_ID", "emulated-cluster-7-9")}
            <= told["environment"].items()
        )
        assert told["environment"]["OMP_NUM_THREADS"] == os.environ["OMP_NUM_THREADS"]
        assert told["address"] == TWO_BY_TWO.address(rank)
        assert told["peers"] == {str(peer): TWO_BY_TWO.address(peer) for peer in (rank ^ 1, rank ^ 2)}
        assert told["sent_twice"] == 0
        assert told["reaches"] == {"loopback": True, "outside": False}

    # The best of the rounds: a busy machine can only make a link slower. A quarter below is allowed for that reason;
    # above the rate only what a bucket had saved up may lie. The clock starts when the first of all that send begins.
    def rate(ranks: list[int], kind: int, count: int) -> float:
        senders = [rank ^ (1, 2)[kind] for rank in ranks]
        seconds = [
            max(seen[rank]["spans"][number][kind][1] for rank in ranks)
            - min(seen[rank]["spans"][number][kind][0] for rank in senders)
            for number in range(rounds)
        ]
        return len(ranks) * count * 8 / min(seconds)

    for rank in range(4):
        assert 0.75 <= rate([rank], 0, intra) / 200e6 <= 1.05
    for node in ([0, 1], [2, 3]):
        assert 0.75 <= rate(node, 1, inter) / 100e6 <= 1.05

    # Headers add 0.4 % to the payload, the acknowledgements of what comes back about as much.
    counted = json.loads(figures.read_text())
    for rank, told in enumerate(seen):
        for way in ("sent", "received"):
            assert told["traffic"]["link"][way] == pytest.approx(rounds * (intra + inter) * 1.01, rel=0.02)
            assert told["traffic"]["inter"][way] == pytest.approx(rounds * inter * 1.01, rel=0.02)
            for link in ("link", "inter"):
                assert counted["ranks"][rank][link][way] == pytest.approx(told["traffic"][link][way], rel=0.02)
    for uplink in counted["uplinks"]:
        assert uplink["sent"] == pytest.approx(2 * rounds * inter * 1.01, rel=0.02)
        assert uplink["received"] == pytest.approx(2 * rounds * inter * 1.01, rel=0.02)
    assert counted["exit_code"] == 0 and counted["inter_bits_per_second"] == 100_000_000
    assert "node 1 uplink" in err and out == ""
    assert not names_of(tool) and host_network() == before


@real
def test_gloo_runs_over_the_links(tmp_path: Path) -> None:
    script = tmp_path / "sum.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "from megatron_parm.parallel.launch import read_environment\n"
        "from tools.cluster.counters import own_traffic\n"
        "dist.init_process_group('gloo')\n"
        "given, got = torch.ones(2, 250_000), torch.empty(2, 250_000)\n"
        "before = own_traffic()\n"
        "dist.all_to_all_single(got, given * (dist.get_rank() + 1))\n"
        "dist.barrier()\n"
        "print(read_environment().world, got.sum(1).tolist(), (own_traffic() - before).inter.sent)\n"
        "dist.barrier()\n"
        "dist.destroy_process_group()\n"
    )
    tool = start(tmp_path, "--nodes", "2", "--ranks-per-node", "1", "--", script)
    out, err = tool.communicate(timeout=120)
    assert tool.returncode == 0, err
    world, *sums, sent = out.replace("[", "").replace("]", "").replace(",", "").split()
    assert (world, sums) == ("2", ["250000.0", "500000.0"])
    assert int(sent) == pytest.approx(1_000_000, rel=0.03)
    assert (tmp_path / "rank_1.log").read_text().splitlines()[-1].startswith("2 [250000.0, 500000.0]")


FAILING = 'if [ $RANK = 2 ]; then echo broken by rank 2 >&2; exit 7; fi; echo $$ >"$1/pid$RANK"; exec sleep 100'


@real
def test_the_first_failure_is_shown_and_its_code_returned(tmp_path: Path) -> None:
    tool = start(
        tmp_path, "--ranks-per-node", "2", "--grace", "1", "--no-python", "--", "sh", "-c", FAILING, "sh", tmp_path
    )
    out, err = tool.communicate(timeout=60)
    assert tool.returncode == 7, err
    assert "rank 2 (node 1) failed first, exit code 7\n" in err and "\nbroken by rank 2\n" in err
    assert out == "" and not names_of(tool)
    assert all(is_gone(pid) for pid in pids(tmp_path, 3))


# Each rank also leaves a process behind that no signal to the rank reaches.
WAITING = (
    'trap "echo stopped >$1/stopped$RANK; exit 0" TERM; setsid sleep 100 & echo $! >"$1/behind$RANK"; '
    'echo $$ >"$1/pid$RANK"; while :; do sleep 0.1; done'
)
WAIT = ("--no-python", "--", "sh", "-c", WAITING, "sh")


@real
def test_a_killed_child_ends_the_run(tmp_path: Path, tools: "list[subprocess.Popen[str]]") -> None:
    tools.append(start(tmp_path, "--ranks-per-node", "2", "--grace", "0.2", *WAIT, tmp_path))
    children = pids(tmp_path, 4)
    os.kill(children[1], signal.SIGKILL)
    _, err = tools[0].communicate(timeout=60)
    assert tools[0].returncode == 128 + signal.SIGKILL
    assert "rank 1 (node 0) failed first, exit code 137 (killed by SIGKILL)" in err
    assert not names_of(tools[0]) and all(is_gone(pid) for pid in children + left_behind(tmp_path))


@real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_and_tells_the_ranks(
    number: signal.Signals, tmp_path: Path, tools: "list[subprocess.Popen[str]]"
) -> None:
    tools.append(start(tmp_path, "--nodes", "1", "--ranks-per-node", "2", *WAIT, tmp_path))
    children = pids(tmp_path, 2)
    tools[0].send_signal(number)
    _, err = tools[0].communicate(timeout=60)
    assert tools[0].returncode == 128 + number and f"stopped by {number.name}" in err
    assert len(list(tmp_path.glob("stopped*"))) == 2
    assert not names_of(tools[0]) and all(is_gone(pid) for pid in children + left_behind(tmp_path))


@real
def test_the_time_limit(tmp_path: Path) -> None:
    limits = ("--timeout", "0.5", "--grace", "0.2")
    tool = start(
        tmp_path,
        "--nodes",
        "1",
        "--ranks-per-node",
        "2",
        *limits,
        "--no-python",
        "--",
        "sh",
        "-c",
        "trap '' TERM; sleep 90",
    )
    _, err = tool.communicate(timeout=60)
    assert tool.returncode == 124 and "no end after 0.5 s; still running: rank 0, 1" in err
    assert not names_of(tool)


@real
def test_what_a_killed_tool_leaves_is_removed_and_a_living_one_spared(
    tmp_path: Path, tools: "list[subprocess.Popen[str]]"
) -> None:
    one_rank = ("--nodes", "1", "--ranks-per-node", "1")
    places = [tmp_path / name for name in ("killed", "living")]
    for place in places:
        place.mkdir()
        tools.append(start(place, *one_rank, *WAIT, place))
    killed, living = tools
    orphan, child = pids(places[0], 1)[0], pids(places[1], 1)[0]
    killed.kill()
    killed.communicate(timeout=60)
    assert len(names_of(killed)) == 2
    tool = start(tmp_path, *one_rank, "--no-python", "--", "true")
    _, err = tool.communicate(timeout=60)
    assert tool.returncode == 0 and "removed 2 network namespaces of a run that was killed" in err
    assert not names_of(killed) and all(is_gone(pid) for pid in [orphan, *left_behind(places[0])])
    assert len(names_of(living)) == 2 and network.start_time(child) is not None
