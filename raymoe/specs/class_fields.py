"""Which fields of a `config.json` transformers declares or reads: by its sources, which do not run.

Other fields become attributes of its configuration object at which nothing looks.
"""

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

# Sources that apply to models of all types; there a name counts if a configuration is asked for it.
# Other integrations are those of kernels and formats, whose own models read such fields themselves.
_COMMON = (
    "*.py",
    "integrations/*attention*.py",
    "integrations/*moe*.py",
    "integrations/heterogeneity/**/*.py",
)
_APART = ("convert_", "tokenization_", "trainer", "training_")  # these read other configurations
_BASE = "PreTrainedConfig"
_ASKING = {"get", "getattr", "hasattr", "pop", "setattr"}
_CONFIG = re.compile(r"\w*(config|config_dict|kwargs)")


def is_read(name: str, model_type: str, directory: Path) -> bool:
    """Whether transformers declares or reads a field of a model type.

    Args:
        name: The field; inside nested objects, without the names of these.
        model_type: The model type.
        directory: The folder with its sources (`ClassDefaults.directory`).
    """
    classes = [*directory.glob("configuration_*.py")]
    own = [*classes, *directory.glob("modeling_*.py")]
    words = frozenset(re.findall(r"\w+", name))
    # What a class does not declare is read only where it may be missing.
    is_of_others = any(_is_of_others(path, name, model_type) for path in classes)
    if any(_has(path, name, words, _asked if is_of_others else _mentions) for path in own):
        return True
    root = directory.parent.parent
    if not words <= _common_words(root):
        return False
    return any(_has(path, name, words, _asks) for path in _common(root))


def _is_of_others(path: Path, name: str, model_type: str) -> bool:
    """Whether only other classes declare a field: that of the whole, or of its images."""
    if name not in _words(path):
        return False
    declared = _declared(path)
    own = declared.get(model_type)
    return own is not None and name not in own and any(name in one for one in declared.values())


@lru_cache(maxsize=1024)
def _declared(path: Path) -> Mapping[str, frozenset[str]]:
    """By model type: the fields of the classes of a file, of those based on transformers' own."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and [_last_name(one) for one in node.bases] == [_BASE]:
            fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
            found[_model_type(node)] = frozenset(map(_last_name, fields))
    return found


def _model_type(node: ast.ClassDef) -> str:
    for one in node.body:
        if isinstance(one, ast.Assign) and _last_name(one.targets[0]) == "model_type":
            return str(one.value.value) if isinstance(one.value, ast.Constant) else ""
    return ""


@lru_cache
def _common(root: Path) -> tuple[Path, ...]:
    found = (path for pattern in _COMMON for path in root.glob(pattern))
    return tuple(path for path in found if not path.name.startswith(_APART))


@lru_cache
def _common_words(root: Path) -> frozenset[str]:
    return frozenset().union(*map(_words, _common(root)))


def _has(
    path: Path, name: str, words: frozenset[str], find: Callable[[ast.AST], Iterator[str]]
) -> bool:
    # Few files have the word, so that few are parsed.
    return words <= _words(path) and name in _found(path, find)


@lru_cache(maxsize=1024)
def _words(path: Path) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", path.read_text(encoding="utf-8")))


@lru_cache(maxsize=1024)
def _found(path: Path, find: Callable[[ast.AST], Iterator[str]]) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(name for node in ast.walk(tree) for name in find(node))


def _mentions(node: ast.AST) -> Iterator[str]:
    """Names that may be those of fields: of attributes, variables and arguments, and any text."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.keyword | ast.arg) and node.arg is not None:
        yield node.arg
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def _asks(node: ast.AST) -> Iterator[str]:
    """All that a class of configurations mentions; elsewhere, what a configuration is asked for."""
    if isinstance(node, ast.ClassDef) and "Config" in node.name:
        yield from (name for one in ast.walk(node) for name in _mentions(one))
    elif isinstance(node, ast.Attribute) and _is_config(node.value):
        yield node.attr
    else:
        yield from _asked(node)


def _asked(node: ast.AST) -> Iterator[str]:
    """What a configuration is asked for by a name that it may not have."""
    if isinstance(node, ast.Call) and _last_name(node.func) in _ASKING:
        asked = [node.func.value] if isinstance(node.func, ast.Attribute) else node.args[:1]
        if any(map(_is_config, asked)):
            yield from (name for one in node.args for name in _mentions(one))


def _is_config(node: ast.AST) -> bool:
    return _CONFIG.fullmatch(_last_name(node)) is not None


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
