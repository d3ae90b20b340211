"""Patterns for names of modules, checked before they are compiled, and the names that modules have.

An accepted pattern consists of names, `.*`, `.+`, digits, character classes and groups without
repetition, and there are few ways to match a name with it, so no module name makes matching slow.
"""

import re
from collections.abc import Iterable, Set
from itertools import accumulate

from raymoe.errors import UnsupportedModelError
from raymoe.specs.layer_weights import HEAD

MAX_WAYS, MAX_PATTERN_CHARACTERS = 2_000_000, 100_000
NAME_CHARACTERS = 100  # of a module, about
_UNDERSTOOD = re.compile(
    r"(?: [\w\-/ ] | \.[*+]? | \\\. | \\d\+? | \[[\w\-]+\]\+? | \(\?: | [()|^$] )*", re.VERBOSE
)
_TOKEN = re.compile(r"\\d\+?|\\.|\.[*+]|\[[\w\-]+\]\+?|\(\?:|.", re.DOTALL)
_ONE_EXPERT = re.compile(r"experts\\?\.[\d\[]")
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
# Other names of canonical modules (`specs.layer_weights`) in checkpoints and in transformers.
_SPELLINGS = (
    ("model.", ("language_model.model.", "model.language_model.", "thinker.model.")),
    ("lm_head", ("language_model.lm_head", "thinker.lm_head")),
    ("mlp.shared_expert.", ("mlp.shared_experts.", "mlp.shared_mlp.")),
    ("mlp.", ("block_sparse_moe.",)),
    ("gate_proj", ("w1",)),
    ("up_proj", ("w3",)),
    ("down_proj", ("w2",)),
)
# Prefixes of names in models that wrap a language model.
_WRAPPERS = (
    ("model.", "model.language_model."),
    ("model.layers.", "language_model.model.layers."),
    (HEAD.removesuffix(".weight"), "language_model.lm_head"),
)


def prefix_or_suffix(pattern: str) -> re.Pattern[str]:
    """Match a module prefix or a literal suffix (`should_convert_module`, transformers 5.23)."""
    return compiled_pattern(pattern, rf"(?:{pattern}){_BOUNDARY}|.*{re.escape(pattern)}$")


def name_or_expression(pattern: str) -> re.Pattern[str]:
    """Match a name, or a prefix after "re:" (`match_name` of compressed-tensors 0.20)."""
    expression = pattern.removeprefix("re:")
    is_expression = expression != pattern
    return compiled_pattern(expression, expression if is_expression else re.escape(pattern) + "$")


def wildcard(pattern: str) -> re.Pattern[str]:
    """Match a name with "*" for any part of it, or modules inside it (modelopt 0.47)."""
    expression = pattern.replace(".", r"\.").replace("*", ".*")
    return compiled_pattern(expression, rf"(?:{expression})(?:\..*)?$")


def is_any(patterns: Iterable[re.Pattern[str]], spellings: Set[str]) -> bool:
    return any(pattern.match(name) for pattern in patterns for name in spellings)


def spellings_of(module: str) -> set[str]:
    """The names that a module may have in checkpoints and in transformers."""
    names = {module}
    for ours, theirs in _SPELLINGS:
        names |= {name.replace(ours, other) for name in names for other in theirs}
    for inner, outer in _WRAPPERS:
        names |= {outer + name.removeprefix(inner) for name in names if name.startswith(inner)}
    return names


def with_parents(module: str) -> Iterable[str]:
    """The name of a module, and those of the modules around it."""
    return accumulate(module.split("."), "{}.{}".format)


def checked_expression(pattern: str, expression: str) -> re.Pattern[str]:
    """Compile an expression that holds a pattern for names of modules.

    Raises:
        UnsupportedModelError: It is not understood, or may take long to match.
    """
    if len(pattern) > MAX_PATTERN_CHARACTERS or not _UNDERSTOOD.fullmatch(pattern):
        raise UnsupportedModelError(
            f"module pattern {pattern!r:.200} is not understood; supported: names with '.*', '.+', "
            f"digits, classes and groups, of at most {MAX_PATTERN_CHARACTERS} characters"
        )
    if _num_ways(pattern) > MAX_WAYS:
        raise UnsupportedModelError(
            f"module pattern {pattern!r:.200} may match a name in more than {MAX_WAYS} ways, which "
            "takes too long; use at most three '.*', and fewer alternatives one after another"
        )
    try:
        return re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise UnsupportedModelError(f"module pattern {pattern!r:.200}: {error}") from error


def compiled_pattern(pattern: str, expression: str) -> re.Pattern[str]:
    found = checked_expression(pattern, expression)
    if _ONE_EXPERT.search(pattern):
        raise UnsupportedModelError(
            f"module pattern {pattern!r:.200} names one expert; the experts of a layer must be "
            "stored in the same format"
        )
    return found


def _num_ways(pattern: str) -> int:
    """Return about how often `re` may have to try: it goes back over what repeats or has choices.

    What follows one another multiplies, alternatives add up. A repetition at the end is not tried
    again.
    """
    levels = [(0, 1)]  # of groups: the alternatives before, and the present one
    for token in _TOKEN.findall(pattern.removesuffix(".*")):
        others, ways = levels[-1]
        if token in ("(", "(?:"):
            levels.append((0, 1))
            continue
        if token == "|":
            levels[-1] = (others + ways, 1)
        elif token == ")" and len(levels) > 1:
            levels.pop()
            before, product = levels[-1]
            levels[-1] = (before, min(product * (others + ways), MAX_WAYS + 1))
        elif token.endswith(("*", "+")):
            repeats = len("100") if token.startswith("\\d") else NAME_CHARACTERS
            levels[-1] = (others, min(ways * repeats, MAX_WAYS + 1))
    return max(others + ways for others, ways in levels)
