"""What all tests share: the worker pools, `--full`, and the markers `cover` and `full`."""

import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in the workers

import pytest
from hypothesis import settings

from tests.harness.layouts import cover, everything
from tests.harness.pools import Pools


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the whole product of every table, not a pairwise cover")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "cover(name=values, ..., where=predicate): parametrise by a pairwise cover of the values, with --full by all",
    )
    config.addinivalue_line("markers", "full: run with --full only")
    # The same examples in every run; no deadline, for the machine may be busy with the workers.
    settings.register_profile("short", deadline=None, derandomize=True, max_examples=40)
    settings.register_profile("full", deadline=None, derandomize=True, max_examples=400)
    settings.load_profile("full" if config.getoption("--full") else "short")


def _all(**_: Any) -> bool:
    return True


def _name(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_name, value))
    return str(getattr(value, "__name__", value)).removeprefix("torch.")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    choose = everything if metafunc.config.getoption("--full") else cover
    for marker in metafunc.definition.iter_markers("cover"):
        axes = dict(marker.kwargs)
        where: Callable[..., bool] = axes.pop("where", _all)
        names = tuple(axes)

        def allowed(*row: Any, names: tuple[str, ...] = names, where: Callable[..., bool] = where) -> bool:
            return where(**dict(zip(names, row, strict=True)))

        rows = choose(*(list(values) for values in axes.values()), where=allowed)
        metafunc.parametrize(names, rows, ids=_name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="runs with --full"))


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Worker pools kept for the whole session."""
    made = Pools()
    yield made
    made.close()
