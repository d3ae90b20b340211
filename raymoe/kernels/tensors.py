"""Nested tuples and dataclasses of tensors, such as the indices that a kernel takes."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def map_tensors(change: Callable[[Tensor], Tensor], value: T) -> T:
    """Return `value` with each of its tensors replaced by what `change` makes of it."""
    change_in: Callable[[Any], Any] = partial(map_tensors, change)
    changed: Any = value
    if isinstance(value, Tensor):
        changed = change(value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        changed = type(value)(*map(change_in, value))
    elif isinstance(value, (tuple, list)):
        changed = type(value)(map(change_in, value))
    elif is_dataclass(value) and not isinstance(value, type):
        names = [each.name for each in fields(value)]
        changed = replace(value, **{name: change_in(getattr(value, name)) for name in names})
    result: T = changed
    return result


def to_device(value: T, device: torch.device) -> T:
    """Return `value` with its tensors on `device`."""
    return map_tensors(lambda tensor: tensor.to(device), value)
