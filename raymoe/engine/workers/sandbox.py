"""What templates in a helper process get in place of Jinja's own globals; loaded by its path."""

from typing import Any

import jinja2
import jinja2.utils


class SafeNamespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore, as in transformers 5.24."""

    # As in jinja2: `self` may be a key too.
    def __init__(*args: Any, **kwargs: Any) -> None:
        jinja2.utils.Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: Any, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


class SafeDict:
    """Makes dicts, and is no type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


GLOBALS = {"namespace": SafeNamespace, "dict": SafeDict()}
