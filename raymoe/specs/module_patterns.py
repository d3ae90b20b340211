"""Patterns of module names in a configuration, which is not trusted: read, never just compiled.

A pattern is taken if it is made of names, `.*`, `.+`, digits, character classes and groups without
repetition: no name makes such an expression run long.
"""

import re
from collections.abc import Iterable

from raymoe.errors import UnsupportedModelError

MAX_REPETITIONS = 6
_UNDERSTOOD = re.compile(
    r"(?: [\w\-/ ] | \.[*+]? | \\\. | \\d\+? | \[[\w\-]+\]\+? | \(\?: | [()|^$] )*", re.VERBOSE
)
_ONE_EXPERT = re.compile(r"experts\\?\.[\d\[]")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
# Other names of canonical modules (`specs.layer_weights`) in checkpoints and in transformers.
_SPELLINGS = (
    ("mlp.shared_expert.", ("mlp.shared_experts.", "mlp.shared_mlp.")),
    ("mlp.", ("block_sparse_moe.",)),
    ("gate_proj", ("w1",)),
    ("up_proj", ("w3",)),
    ("down_proj", ("w2",)),
)


def prefix_or_suffix(pattern: str) -> re.Pattern[str]:
    """What begins with the pattern up to the end of a module's name, or ends with it as it stands.

    Source: `should_convert_module` of transformers 5.23.
    """
    return _compiled(pattern, rf"(?:{pattern}){_BOUNDARY}|.*{re.escape(pattern)}$")


def name_or_expression(pattern: str) -> re.Pattern[str]:
    """The module of exactly this name, or what begins with the expression behind "re:".

    Source: `match_name` of compressed-tensors 0.20.
    """
    expression = pattern.removeprefix("re:")
    is_expression = expression != pattern
    return _compiled(expression, expression if is_expression else re.escape(pattern) + "$")


def is_matched(module: str, patterns: Iterable[re.Pattern[str]]) -> bool:
    """Whether some pattern matches a canonical module under some of its names."""
    names = {module}
    for ours, theirs in _SPELLINGS:
        names |= {name.replace(ours, other) for name in names for other in theirs}
    return any(pattern.match(name) for pattern in patterns for name in names)


def _compiled(pattern: str, expression: str) -> re.Pattern[str]:
    num_repetitions = pattern.count("*") + pattern.count("+")
    if not _UNDERSTOOD.fullmatch(pattern) or num_repetitions > MAX_REPETITIONS:
        raise UnsupportedModelError(
            f"module pattern {pattern!r} is not understood; supported: names with '.*', '.+', "
            f"digits, classes and groups, at most {MAX_REPETITIONS} repetitions"
        )
    if _ONE_EXPERT.search(pattern):
        raise UnsupportedModelError(
            f"module pattern {pattern!r} names one expert; the experts of a layer must be stored "
            "in the same format"
        )
    try:
        return re.compile(expression)
    except re.error as error:
        raise UnsupportedModelError(f"module pattern {pattern!r}: {error}") from error
