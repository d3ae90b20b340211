"""The shape of the package: `python tests/house.py` prints it, test_house.py holds it."""

import ast
import functools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "raymoe"
MAX_LINES_OF_A_FUNCTION = 60

# Words of our own for what the field has a word for. Of identifiers (parts between underscores and
# capitals) and of prose; `pass` the keyword and the verb are fine, "a pass" is not.
WORDS = (
    "intake", "hurry", "knob", "knobs", "alike", "strikes", "guilty", "acquit", "arrange",
    "arranged", "unfold", "unfolded", "touched", "tally", "dear",
)  # fmt: skip
NAMES = (
    *WORDS, "passes", "wave", "waves", "takes", "most", "least", "settle", "settled", "remains",
    "pace", "suspects",
)  # fmt: skip
PROSE = re.compile(
    rf"\b({'|'.join(WORDS)}|waves?|passes of|(?:a|the|each|one|every|per|next|last|first|this|of|"
    r"decode|prefill|whole|steady|typical|mixed) pass(?:es)?)\b",
    re.IGNORECASE,
)


def files() -> list[Path]:
    """All files of the package."""
    return sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """What a file contains."""
    return ast.parse(path.read_text())


def module_of(path: Path) -> str:
    """Its dotted name."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run: not those for types alone, but those inside functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not (
            isinstance(child, ast.If)
            and isinstance(child.test, ast.Name)
            and child.test.id == "TYPE_CHECKING"
        ):
            yield from _imports(child)


def import_graph() -> dict[str, set[str]]:
    """Which module runs an import of which."""
    modules = {module_of(path): path for path in files()}
    graph: dict[str, set[str]] = defaultdict(set)
    for name, path in modules.items():
        for node in _imports(tree_of(path)):
            if isinstance(node, ast.Import):
                names = {alias.name for alias in node.names}
            else:
                names = {node.module or ""} | {f"{node.module}.{a.name}" for a in node.names}
                names -= {node.module} if all(f"{node.module}.{a.name}" in modules for a in node.names) else set()  # fmt: skip # noqa: E501
            graph[name] |= (names & set(modules)) - {name}
    return graph


def circles() -> list[list[str]]:
    """Modules that import each other, directly or by others."""
    graph = import_graph()
    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        stack = list(graph[start])
        while stack:
            name = stack.pop()
            if name not in seen:
                seen.add(name)
                stack.extend(graph.get(name, ()))
        reach[start] = seen
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach.get(other, ())))
        for name in graph
        if name in reach[name]
    }
    return [list(group) for group in sorted(groups)]


def _prose_and_names(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is prose): names, strings and comments."""
    text = path.read_text()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, True
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name, False
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, False
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr, False
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.search(r"(?:^|\s)#\s(.*)$", line):
            yield number, match[1], True


def banned_words() -> list[str]:
    """Where one is, and which."""
    found = set()
    for path in files():
        where = path.relative_to(ROOT)
        for line, text, is_prose in _prose_and_names(path):
            if is_prose:
                found |= {f"{where}:{line}: {match[0]}" for match in PROSE.finditer(text)}
            else:
                parts = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", text).lower().split("_")
                found |= {f"{where}:{line}: {text}" for part in parts if part in NAMES}
    return sorted(found)


def long_functions() -> list[str]:
    """Those of too many lines."""
    return [
        f"{path.relative_to(ROOT)}: {node.name} has {length} lines"
        for path in files()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_LINES_OF_A_FUNCTION
    ]


def main() -> None:
    """Print all of it."""
    for check in (long_functions, circles, banned_words):
        found = check()
        print(f"{check.__name__}: {len(found)}")
        for line in found[: None if "-v" in sys.argv else 12]:
            print(f"  {line}")


if __name__ == "__main__":
    main()
