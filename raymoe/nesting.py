"""How deep is a value? Without a bound, recursion ends where the stack of the caller says."""

MAX_LEVELS = 128  # of lists and objects in one another
MAX_VALUES = 10_000_000  # parts that are shared count each time: they are written each time

_CONTAINERS = (dict, list, tuple, frozenset)
_LEAVES = frozenset((int, float, str, bool, type(None)))  # most values: one look-up decides


def nesting_problem(value: object) -> str:
    """Say why a value must not be walked through by recursion, or ""."""
    level = [value] if isinstance(value, _CONTAINERS) else []
    num_values = 0
    for _ in range(MAX_LEVELS):
        deeper = []
        for container in level:
            num_values += len(container)
            if num_values > MAX_VALUES:
                return f"has more than {MAX_VALUES} values"
            items = container.values() if isinstance(container, dict) else container
            deeper += [
                item
                for item in items
                if type(item) not in _LEAVES and isinstance(item, _CONTAINERS)
            ]
        level = deeper
        if not level:
            return ""
    return f"is nested more than {MAX_LEVELS} levels deep"
