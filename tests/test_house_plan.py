"""The house stands as planned: imports go down, only parallel/ is distributed, nothing unsafe, nothing too long.

Reference: the tour of the house in CONTRIBUTING.md. Each rule has small sources that must fail and some that must pass.
"""

from pathlib import Path

import pytest

from tests.harness.house_plan import FLOORS, PACKAGE, Source, check, read_house

ROOT = Path(__file__).parent.parent


def test_the_house_stands_as_planned() -> None:
    found = check(read_house(ROOT))
    assert not found, "\n" + "\n".join(map(str, found))


def test_every_room_of_the_package_has_a_floor() -> None:
    rooms = {path.parent.name for path in (ROOT / PACKAGE).glob("*/*.py")}
    assert rooms <= set(FLOORS)


BROKEN = [
    # path in the package (or of an entrance), source, line, part of the message
    ("layers/x.py", "import os\nfrom megatron_parm.moe.gate import Gate\n", 2, "from above (floor 5)"),
    ("parallel/x.py", "from megatron_parm import training\n", 1, "from above (floor 7)"),
    ("parallel/x.py", "from megatron_parm.layers import *\n", 1, "from above (floor 4)"),
    ("errors.py", "import megatron_parm.config.run\n", 1, "from above (floor 1)"),
    ("config/x.py", "from ..parallel.grid import RankGrid\n", 1, "from above (floor 3)"),
    ("layers/x.py", "from megatron_parm.data.blend import Blend\n", 1, "another room of floor 4"),
    ("training/x.py", "from tools.show_layout import main\n", 1, "nothing imports an entrance"),
    ("../tools/x.py", "import pretrain_gpt\n", 1, "nothing imports an entrance"),
    ("../tools/x.py", "from tools.emulated_cluster import main\n", 1, "nothing imports an entrance"),
    ("training/x.py", "from tools.cluster.topology import Cluster\n", 1, "nothing imports an entrance"),
    ("../pretrain_gpt.py", "from tools.cluster import topology\n", 1, "nothing imports an entrance"),
    ("../tools/peers/x.py", "from tools.emulated_cluster import main\n", 1, "nothing imports an entrance"),
    ("../tools/peers/x.py", "import pickle\n", 1, "foreign code"),
    ("../tools/peers_x.py", "import torch.distributed as dist\n", 1, "only parallel/ touches"),
    ("training/x.py", "from tests.harness.pools import Pool\n", 1, "nothing imports an entrance"),
    ("attic/x.py", "from megatron_parm.moe.gate import Gate\n", 1, "from above"),
    ("layers/x.py", "def f():\n    import numpy\n", 2, "inside a function"),
    ("layers/x.py", "class A:\n    def f(self):\n        from torch import nn\n", 3, "inside a function"),
    ("moe/x.py", "import torch.distributed as dist\n", 1, "only parallel/ touches"),
    ("moe/x.py", "from torch import distributed\n", 1, "only parallel/ touches"),
    ("moe/x.py", "from torch.distributed import all_reduce\n", 1, "torch.distributed.all_reduce"),
    ("moe/x.py", "import torch\ntorch.distributed.barrier()\n", 2, "torch.distributed.barrier"),
    ("moe/x.py", "from torch.distributed.tensor import DTensor\n", 1, "only parallel/ touches"),
    ("checkpoint/x.py", "from torch.distributed import barrier\n", 1, "only parallel/ touches"),
    ("checkpoint/x.py", "from torch.distributed import pipelining\n", 1, "only parallel/ touches"),
    ("pipeline/x.py", "from torch.distributed import checkpoint\n", 1, "only parallel/ touches"),
    ("layers/x.py", "def f(x):\n    return x.cuda()\n", 2, "a device is an argument"),
    ("layers/x.py", "import torch\nn = torch.cuda.device_count()\n", 2, "name a device backend"),
    ("training/x.py", "import sys\nargs = sys.argv[1:]\n", 2, "reads sys.argv"),
    ("training/x.py", "import os\nport = os.environ['PORT']\n", 2, "reads os.environ"),
    ("parallel/x.py", "from os import environ\n", 1, "imports os.environ"),
    ("../tools/x.py", "import os\nos.getenv('RANK')\n", 2, "reads os.getenv"),
    ("optim/x.py", "def f():\n    from apex.optimizers import FusedAdam\n", 2, "only accelerators.py"),
    ("optim/x.py", "import transformer_engine.pytorch as te\n", 1, "only accelerators.py"),
    ("data/x.py", "import pickle\n", 1, "foreign code"),
    ("data/x.py", "from pickle import loads\n", 1, "foreign code"),
    ("data/x.py", "eval('1')\n", 1, "calls eval"),
    ("data/x.py", "exec('1')\n", 1, "calls exec"),
    ("config/x.py", "import yaml\nyaml.load('')\n", 2, "calls yaml.load"),
    ("config/x.py", "from yaml import load\n", 1, "imports yaml.load"),
    ("data/x.py", "import numpy\nnumpy.load('x',\n  allow_pickle=True)\n", 3, "allow_pickle=True"),
    ("../tools/x.py", "import subprocess\nsubprocess.run('ls', shell=True)\n", 2, "shell=True"),
    ("checkpoint/x.py", "import torch\ntorch.load('x', weights_only=False)\n", 2, "weights_only=False"),
    ("data/x.py", "def f():\n    global cache\n    cache = 1\n", 2, "module state"),
    ("data/x.py", "x = 1  # TODO: more\n", 1, "leaves something to do"),
    ("data/x.py", "def f():\n    raise NotImplementedError\n", 2, "NotImplementedError"),
    ("data/x.py", "x = 1\n" * 401, 401, "401 lines"),
    ("data/x.py", "x = 1\n\ndef f():\n" + "    x = 1\n" * 80, 3, "f has 81 lines"),
]

SOUND = [
    ("errors.py", "from megatron_parm.shapes import expect_shape\n"),
    ("layers/x.py", "from megatron_parm.layers.norm import RMSNorm\nfrom megatron_parm.parallel.context import Axis\n"),
    ("layers/x.py", "from .norm import RMSNorm\nfrom ..parallel.context import Axis\n"),
    ("../pretrain_gpt.py", "from megatron_parm.training.trainer import Trainer\n"),
    ("../tools/x.py", "from tools.cluster import topology\nfrom tools.cluster.counters import own_traffic\n"),
    ("../examples/x.py", "from tools.measure.launcher import launcher_of\n"),
    ("../tools/peers/x.py", "import os\nimport torch.distributed as dist\nrank = os.environ['RANK']\n"),
    ("../tools/cluster/x.py", "from tools.cluster.topology import Cluster\n"),
    ("../tools/x.py", "import sys\n\ndef main(argv):\n    return 0\n\nsys.exit(main(sys.argv[1:]))\n"),
    ("observe/x.py", "def f():\n    import wandb\n    from torch.utils.tensorboard import SummaryWriter\n"),
    ("accelerators.py", "def f():\n    import transformer_engine.pytorch\n"),
    ("parallel/x.py", "import torch.distributed as dist\ndist.barrier()\n"),
    ("checkpoint/x.py", "import torch.distributed.checkpoint as dcp\nfrom torch.distributed.tensor import DTensor\n"),
    ("checkpoint/x.py", "from torch.distributed.device_mesh import DeviceMesh\n"),
    ("pipeline/x.py", "from torch.distributed.pipelining import PipelineStage\n"),
    ("observe/x.py", "import torch\ntorch.cuda.max_memory_allocated()\n"),
    ("config/parser.py", "import sys\nargs = sys.argv[1:]\n"),
    ("parallel/launch.py", "import os\nrank = os.environ['RANK']\n"),
    ("data/x.py", "import numpy\nnumpy.load('x', allow_pickle=False)\nmodel.eval()\n"),
    ("config/x.py", "import yaml\nyaml.safe_load('')\n"),
    ("data/x.py", "x = 1\n" * 400),
    ("data/x.py", "def f():\n" + "    x = 1\n" * 79),
]


def _source(place: str, text: str) -> Source:
    return Source(place.removeprefix("../") if place.startswith("../") else f"{PACKAGE}/{place}", text)


@pytest.mark.parametrize(("place", "text", "line", "message"), BROKEN)
def test_a_broken_rule_is_found_at_its_line(place: str, text: str, line: int, message: str) -> None:
    source = _source(place, text)
    found = check([source])
    assert [finding.line for finding in found] == [line], found
    assert message in str(found[0]) and str(found[0]).startswith(f"{source.path}:{line}: ")


@pytest.mark.parametrize(("place", "text"), SOUND)
def test_what_the_rules_allow_passes(place: str, text: str) -> None:
    assert check([_source(place, text)]) == []


def test_a_cycle_is_found() -> None:
    first = _source("moe/a.py", "from megatron_parm.moe.b import f\n")
    second = _source("moe/b.py", "import os\nfrom megatron_parm.moe import c\n")
    third = _source("moe/c.py", "from . import a\n")
    assert check([first, second]) == []
    (found,) = check([first, second, third])
    assert "megatron_parm.moe.a -> megatron_parm.moe.b -> megatron_parm.moe.c -> megatron_parm.moe.a" in found.text
    assert (found.path, found.line) == ("megatron_parm/moe/c.py", 1)
