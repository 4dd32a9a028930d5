"""Says how far the losses of a BERT on the validation split fell, and exits with 1 if not far enough. Floor 8."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_parm.errors import MegatronParmError
from megatron_parm.observe.json_lines import Json, number_of, read_run


def report(events: list[dict[str, Json]], least_fall: float) -> tuple[list[str], bool]:
    """The lines to print, and whether the loss of masked words fell by `least_fall` nats."""
    valid = [event for event in events if event["event"] == "valid" and event.get("split") == "valid"]
    if len(valid) < 2:
        return ["the log has no two validations of which one could be the better"], False
    first, last = valid[0], valid[-1]
    fall = number_of(first["lm_loss"]) - number_of(last["lm_loss"])
    has_fallen = fall >= least_fall
    lines = [
        f"masked words: validation loss {number_of(first['lm_loss']):.3f} at iteration {first['iteration']}, "
        f"{number_of(last['lm_loss']):.3f} at iteration {last['iteration']}: {fall:.3f} nats less "
        f"({'at least' if has_fallen else 'should be at least'} {least_fall:g})"
    ]
    if "sop_loss" in last:
        lines.append(
            f"order of two segments: {number_of(first['sop_loss']):.3f}, then {number_of(last['sop_loss']):.3f} "
            f"(ln 2 = {math.log(2):.3f} is guessing; it is learned later than the words)"
        )
    return lines, has_fallen


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; 0 if the loss fell far enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--log", required=True, help="the run's --log-json file")
    parser.add_argument("--least-fall", type=float, default=1.0, metavar="NATS", help="in nats (default: 1)")
    flags = parser.parse_args(argv)
    try:
        lines, has_fallen = report(read_run(flags.log).events, flags.least_fall)
    except MegatronParmError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print("\n".join(lines))
    return 0 if has_fallen else 1


if __name__ == "__main__":
    sys.exit(main())
