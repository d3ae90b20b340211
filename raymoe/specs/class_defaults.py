"""Values of fields that a `config.json` leaves out: those of transformers' configuration classes.

The sources of these classes are read and not run, because importing them loads torch.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path

from raymoe.errors import ConfigError

_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassDefaults:
    """What the configuration class of a model type says.

    Attributes:
        values: Defaults by field; those of nested objects as "object.field".
        aliases: Other names of fields -> their names (`attribute_map`).
        theta: Base of the rope (`default_theta`).
        directory: Folder of the sources of the class; None if there are none.
    """

    model_type: str
    values: Mapping[str, object] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    theta: object = 10_000.0
    directory: Path | None = None

    def get(self, name: str) -> object:
        """The default of a field; None if the class has no such field."""
        if not self.values:
            raise ConfigError(
                f"config.json does not say what {name} is, and the installed transformers has no "
                f"configuration class of model_type {self.model_type!r} with a default; add "
                f"{name} to config.json or install a transformers that knows the model"
            )
        return self.values.get(name)


@lru_cache
def class_defaults(model_type: str, nested: tuple[str, ...] = ()) -> ClassDefaults:
    """Read the class of a model type; without values if transformers has none."""
    for path in _candidates(model_type):
        module = ast.parse(path.read_text(encoding="utf-8"))
        classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
        bodies = [dict(_assignments(node)) for node in classes]
        body = next((one for one in bodies if one.get("model_type") == model_type), None)
        if body is None:
            continue
        values = {name: value for name, value in body.items() if name not in _NOT_FIELDS}
        for one in bodies:
            outer = one.get("base_config_key")
            if outer in nested:
                values |= {f"{outer}.{name}": value for name, value in one.items()}
        aliases, theta = body.get("attribute_map"), body.get("default_theta", 10_000.0)
        return ClassDefaults(
            model_type=model_type,
            values=values,
            aliases=aliases if isinstance(aliases, dict) else {},
            theta=theta,
            directory=path.parent,
        )
    return ClassDefaults(model_type=model_type)


# Class variables.
_NOT_FIELDS = {"model_type", "base_config_key", "attribute_map", "default_theta"}


_WITHIN = {"step3p5": "step3p7"}  # model types whose class is in the files of another


def _candidates(model_type: str) -> Iterator[Path]:
    """Files that may hold the class: of the model type, or of one that contains it."""
    spec = PathFinder.find_spec("transformers")  # the sources; nothing is imported
    if spec is None or not spec.submodule_search_locations:
        return
    root = Path(next(iter(spec.submodule_search_locations))) / "models"
    name = _WITHIN.get(model_type, model_type)
    while name:
        path = root / name / f"configuration_{name}.py"
        if path.is_file():
            yield path
        name = name.rpartition("_")[0]


def _assignments(node: ast.ClassDef) -> Iterator[tuple[str, object]]:
    for statement in node.body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if isinstance(target, ast.Name):
            try:
                yield target.id, _evaluate(statement.value)
            except ValueError:  # an expression of names and calls: a class, or a checked number
                continue


def _evaluate(node: ast.expr) -> object:
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(left, int) and isinstance(right, int):
            return _OPERATORS[type(node.op)](left, right)
    return ast.literal_eval(node)
