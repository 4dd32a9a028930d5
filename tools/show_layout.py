"""Show which ranks form each group of each process axis, and the place of every rank. No processes are started.

    python tools/show_layout.py --world-size 8 --tensor-model-parallel-size 2 --expert-model-parallel-size 2

The sizes are the flags of training. Axes: tp = tensor parallel (the paper's MP), dp = replicas of the dense layers,
pp = pipeline stages; esp = slices of an expert, ep = experts spread, edp = replicas of the experts, ep_esp = the joint
group of the fused AlltoAll. Floor 8.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository: this runs without an installation

from megatron_parm.config.parallel import ParallelConfig
from megatron_parm.config.parser import build_parser, read_settings
from megatron_parm.errors import ConfigError, LayoutError
from megatron_parm.parallel.grid import RankGrid

SHOWN_AXES = {
    "tp": "tensor parallel (MP): slices of the dense layers",
    "dp": "data parallel: replicas of the dense layers",
    "pp": "pipeline stages",
    "esp": "expert tensor parallel (ESP): slices of one expert",
    "ep": "expert parallel: different experts",
    "edp": "expert data parallel: replicas of the experts",
    "ep_esp": "joint group of the fused AlltoAll (EP&ESP), esp fastest",
    "stage": "all ranks of a pipeline stage",
}
PLACES = ("pp", "dp", "tp", "edp", "ep", "esp", "ep_esp")


def groups_text(grid: RankGrid) -> str:
    """Every group of every axis, one axis a paragraph."""
    paragraphs = []
    for axis, meaning in SHOWN_AXES.items():
        groups = grid.groups(axis)
        count = f"{len(groups)} group{'s' if len(groups) > 1 else ''} of {grid.size(axis)}"
        lines = [f"{axis}: {meaning}; {count}"]
        lines += ["  " + " ".join(map(str, ranks)) for ranks in groups]
        paragraphs.append("\n".join(lines))
    return "\n\n".join(paragraphs)


def places_text(grid: RankGrid) -> str:
    """One row a rank: its place on every axis."""
    place = {axis: {rank: i for ranks in grid.groups(axis) for i, rank in enumerate(ranks)} for axis in PLACES}
    heads = ["rank", *PLACES]
    rows = [heads, *([str(rank), *(str(place[axis][rank]) for axis in PLACES)] for rank in range(grid.world))]
    widths = [max(4, len(head)) for head in heads]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(argv: Sequence[str]) -> int:
    """Print the layout of the sizes in `argv`; the exit code."""
    parser = build_parser([ParallelConfig], prog="show_layout.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--world-size", type=int, required=True, metavar="N", help="ranks of the whole run")
    try:
        settings = read_settings(parser, argv, [ParallelConfig])
        sizes = settings.of(ParallelConfig)
        if settings.namespace.world_size < 1:
            raise LayoutError(f"--world-size {settings.namespace.world_size} must be at least 1")
        grid = RankGrid(
            settings.namespace.world_size,
            tp=sizes.tensor_model_parallel_size,
            pp=sizes.pipeline_model_parallel_size,
            ep=sizes.expert_model_parallel_size,
            esp=sizes.esp,
        )
    except ConfigError as error:
        print(f"show_layout.py: {error}", file=sys.stderr)
        return error.exit_code
    print(
        f"world {grid.world} = pp {grid.pp} x dp {grid.dp} x tp {grid.tp} = "
        f"pp {grid.pp} x edp {grid.edp} x ep {grid.ep} x esp {grid.esp}\n"
    )
    print(groups_text(grid), end="\n\n")
    print(places_text(grid))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
