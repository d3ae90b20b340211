"""Values that several commands take."""

from raymoe.units import parse_bytes


def size(text: object) -> int:
    """Parser of an option such as --host-memory 192GiB; typer sends the default through it, too."""
    return parse_bytes(str(text))
