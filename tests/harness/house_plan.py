"""The rules of the house that a reader of imports and names can check. The floors are those of CONTRIBUTING's tour.

Every rule is a function of one `Source` that yields a `Finding` for each offending line; `check` runs all of them and
the one rule that needs all files together, that imports form no cycle.
"""

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = "megatron_parm"
GROUND = "ground"
ENTRANCES = "entrances"
FLOORS: dict[str, int] = {
    GROUND: 0,
    "config": 1,
    "tokenizers": 2,
    "observe": 2,
    "parallel": 3,
    "layers": 4,
    "grads": 4,
    "data": 4,
    "moe": 5,
    "optim": 5,
    "models": 6,
    "pipeline": 6,
    "checkpoint": 6,
    "training": 7,
    ENTRANCES: 8,
}
# Below these lie parts of tools, no entrances; files of tools/ and examples/ import them.
PARTS_OF_TOOLS = ("tools.cluster.", "tools.measure.", "tools.paper.")
# Programs for another Python, which has a peer and not this package: they stand outside the house.
OUTSIDE = "tools/peers/"
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 80

# Packages that a run may lack, or that may be broken without harm to it; only these are imported inside a function.
OPTIONAL = (
    "apex",
    "transformer_engine",
    "wandb",
    "torch.utils.tensorboard",
    "transformers",
    "datasets",
    "pyarrow",
    "zstandard",
    "lm_eval",
    "deepspeed",
    "megatron",
)
# Slow to load, and needed by few runs: these may be imported where they are needed.
SLOW = ("numba",)
ACCELERATED = {"apex", "transformer_engine"}
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {
    "eval",
    "exec",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
    "yaml.load_all",
    "os.system",
    "os.popen",
}
UNSAFE_KEYWORDS = {("allow_pickle", "True"), ("shell", "True"), ("weights_only", "False")}
PROCESS_STATE = {"sys.argv", "os.environ", "os.getenv", "os.environb", "os.putenv"}
READERS_OF_PROCESS_STATE = {f"{PACKAGE}/config/parser.py", f"{PACKAGE}/parallel/launch.py"}
# Parts of torch.distributed that hold no collective call of ours.
DISTRIBUTED_PARTS = {
    "checkpoint": ("checkpoint", "tensor", "device_mesh"),
    "pipeline": ("pipelining",),
}
UNFINISHED = re.compile(r"#.*\b(TODO|FIXME|XXX)\b")


@dataclass(frozen=True)
class Import:
    """One module that a file imports."""

    module: str
    line: int
    in_function: bool


@dataclass(frozen=True)
class Finding:
    """A broken rule, at a line."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Source:
    """A file of the house, by its path from the root."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def module(self) -> str:
        parts = Path(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        return room_of(self.module) or ENTRANCES

    def find(self, line: int, text: str) -> Finding:
        return Finding(self.path, line, text)

    def imports(self) -> Iterator[Import]:
        """Every import. `from a import b` yields a.b, for b may be a module."""
        inside = {
            id(node)
            for function in ast.walk(self.tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for node in ast.walk(function)
        }
        package = self.module if self.path.endswith("__init__.py") else self.module.rpartition(".")[0]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(alias.name, node.lineno, id(node) in inside)
            elif isinstance(node, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield Import(f"{base}.{alias.name}", node.lineno, id(node) in inside)


def room_of(module: str) -> str | None:
    """The room of a module of ours, None for a foreign module."""
    parts = module.split(".")
    if parts[0] in ("tools", "examples", "tests") or (
        parts[0].startswith(("pretrain_", "finetune_")) and len(parts) <= 2
    ):
        return ENTRANCES
    if parts[0] != PACKAGE:
        return None
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else GROUND


def dotted(node: ast.AST) -> str:
    """`a.b.c` for an attribute chain on a name, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def imports_go_down(source: Source) -> Iterator[Finding]:
    """From lower floors and the own room only; entrances are imported by nobody, their parts by tools."""
    if source.room not in FLOORS:
        yield source.find(1, f"room {source.room} has no floor in the house plan")
        return
    for found in source.imports():
        room = room_of(found.module)
        if room is None:
            continue
        if room == ENTRANCES:
            if source.path.startswith(("tools/", "examples/")) and found.module.startswith(PARTS_OF_TOOLS):
                continue
            yield source.find(found.line, f"imports {found.module}, but nothing imports an entrance")
        elif FLOORS[room] > FLOORS[source.room]:
            yield source.find(
                found.line,
                f"{source.room} (floor {FLOORS[source.room]}) imports {found.module} from above (floor {FLOORS[room]})",
            )
        elif FLOORS[room] == FLOORS[source.room] and room != source.room:
            yield source.find(found.line, f"{source.room} imports {found.module}, another room of floor {FLOORS[room]}")


def no_import_in_functions(source: Source) -> Iterator[Finding]:
    """Save for optional packages, and slow ones that few runs need."""
    for found in source.imports():
        is_optional = any(f"{found.module}.".startswith(f"{package}.") for package in OPTIONAL + SLOW)
        if found.in_function and not is_optional:
            yield source.find(found.line, f"imports {found.module} inside a function")


def only_parallel_is_distributed(source: Source) -> Iterator[Finding]:
    """torch.distributed belongs to parallel/, save for the parts that checkpoint/ and pipeline/ use."""
    if source.room == "parallel":
        return
    prefixes = tuple(f"torch.distributed.{part}" for part in DISTRIBUTED_PARTS.get(source.room, ()))
    uses = [(found.module, found.line) for found in source.imports()]
    uses += [(dotted(node), node.lineno) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    for name, line in dict.fromkeys(uses):
        is_longest = not any(other.startswith(f"{name}.") and at == line for other, at in uses)
        if name.startswith("torch.distributed") and is_longest and not name.startswith(prefixes or "-"):
            yield source.find(line, f"uses {name}; only parallel/ touches torch.distributed")


def devices_are_arguments(source: Source) -> Iterator[Finding]:
    """No `.cuda()`; torch.cuda itself only where a backend is named."""
    may_name_backend = source.room in ("parallel", "observe") or source.module == f"{PACKAGE}.accelerators"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            yield source.find(node.lineno, "calls .cuda(); a device is an argument")
        elif isinstance(node, ast.Attribute) and dotted(node) == "torch.cuda" and not may_name_backend:
            yield source.find(node.lineno, "names torch.cuda; only parallel/ and observe/ name a device backend")


def few_read_process_state(source: Source) -> Iterator[Finding]:
    """argv and the environment are read in two files; an entrance may hand on its argv."""
    if source.path in READERS_OF_PROCESS_STATE:
        return
    forbidden = PROCESS_STATE - ({"sys.argv"} if source.room == ENTRANCES else set())
    for found in source.imports():
        if found.module in forbidden:
            yield source.find(
                found.line, f"imports {found.module}; only {' and '.join(sorted(READERS_OF_PROCESS_STATE))} may"
            )
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and dotted(node) in forbidden:
            yield source.find(
                node.lineno, f"reads {dotted(node)}; only {' and '.join(sorted(READERS_OF_PROCESS_STATE))} may"
            )


def one_file_knows_accelerators(source: Source) -> Iterator[Finding]:
    """apex and transformer_engine are imported by accelerators.py alone."""
    if source.module == f"{PACKAGE}.accelerators":
        return
    for found in source.imports():
        if found.module.split(".")[0] in ACCELERATED:
            yield source.find(found.line, f"imports {found.module}; only accelerators.py may")


def nothing_unsafe(source: Source) -> Iterator[Finding]:
    """Nothing that can run what a file or a user's string says."""
    for found in source.imports():
        if found.module.split(".")[0] in UNSAFE_MODULES or found.module in UNSAFE_CALLS:
            yield source.find(found.line, f"imports {found.module}, which can run foreign code")
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        if dotted(node.func) in UNSAFE_CALLS:
            yield source.find(node.lineno, f"calls {dotted(node.func)}, which can run foreign code")
        for keyword in node.keywords:
            value = ast.unparse(keyword.value)
            if (keyword.arg, value) in UNSAFE_KEYWORDS:
                yield source.find(keyword.value.lineno, f"passes {keyword.arg}={value}, which can run foreign code")


def no_module_state(source: Source) -> Iterator[Finding]:
    """Values are passed as arguments; no function rebinds a global."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Global):
            yield source.find(node.lineno, f"global {', '.join(node.names)}: module state")


def nothing_unfinished(source: Source) -> Iterator[Finding]:
    """No TODO and no NotImplementedError: a limit is stated in the docs where it shows."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield source.find(number, "leaves something to do")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and node.id == "NotImplementedError":
            yield source.find(node.lineno, "raises NotImplementedError")


def files_and_functions_are_short(source: Source) -> Iterator[Finding]:
    """One idea each."""
    lines = len(source.text.splitlines())
    if lines > MOST_LINES_OF_A_FILE:
        yield source.find(lines, f"the file has {lines} lines, more than {MOST_LINES_OF_A_FILE}")
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MOST_LINES_OF_A_FUNCTION:
                yield source.find(node.lineno, f"{node.name} has {lines} lines, more than {MOST_LINES_OF_A_FUNCTION}")


RULES: tuple[Callable[[Source], Iterator[Finding]], ...] = (
    imports_go_down,
    no_import_in_functions,
    only_parallel_is_distributed,
    devices_are_arguments,
    few_read_process_state,
    one_file_knows_accelerators,
    nothing_unsafe,
    no_module_state,
    nothing_unfinished,
    files_and_functions_are_short,
)
RULES_OF_THE_PACKAGE = (only_parallel_is_distributed, devices_are_arguments, few_read_process_state)


def rules_for(source: Source) -> list[Callable[[Source], Iterator[Finding]]]:
    """All, save for programs outside the house, which have no room to take groups and devices from."""
    return [rule for rule in RULES if not (source.path.startswith(OUTSIDE) and rule in RULES_OF_THE_PACKAGE)]


def cycles(sources: Sequence[Source]) -> Iterator[Finding]:
    """Each import that closes a cycle between files."""
    by_module = {source.module: source for source in sources}

    def targets(source: Source) -> Iterator[tuple[str, int]]:
        for found in source.imports():
            name = found.module if found.module in by_module else found.module.rpartition(".")[0]
            if name in by_module:
                yield name, found.line

    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> Iterator[Finding]:
        for target, line in targets(by_module[module]):
            if target in trail:
                chain = " -> ".join([*trail[trail.index(target) :], target])
                yield by_module[module].find(line, f"closes an import cycle: {chain}")
            elif target not in done:
                yield from walk(target, (*trail, target))
        done.add(module)

    for module in sorted(by_module):
        if module not in done:
            yield from walk(module, (module,))


def check(sources: Sequence[Source]) -> list[Finding]:
    """Every finding in `sources`."""
    found = [finding for source in sources for rule in rules_for(source) for finding in rule(source)]
    return found + list(cycles(sources))


def read_house(root: Path) -> list[Source]:
    """The package and its entrances."""
    places = [*root.glob("*.py"), *(p for room in (PACKAGE, "tools", "examples") for p in (root / room).rglob("*.py"))]
    return [Source(path.relative_to(root).as_posix(), path.read_text()) for path in sorted(places)]
