"""Numbered files in a directory of their own: each is there whole or not at all."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from raymoe.cli.storage import Location
from raymoe.errors import ConfigError

PREFIX = "part-"


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of an output.

    Attributes:
        directory: Where they are, and nothing else.
        suffix: Of their names.
        run: Ends the names of new parts, so that no run replaces another's.
    """

    directory: Location
    suffix: str
    run: str = ""

    def find(self) -> list[Location]:
        """Return the parts that are there, in order."""
        return [one for one in self.directory.entries() if self._is_part(one.name)]

    def check_only_ours(self) -> None:
        """Remove what a crash left half written.

        Raises:
            ConfigError: There is something that raymoe did not write.
        """
        for one in self.directory.entries():
            if one.name.startswith(f".{PREFIX}") and one.name.endswith(f"{self.suffix}.tmp"):
                one.delete()
            elif not self._is_part(one.name):
                raise ConfigError(
                    f"--output: {self.directory} holds {one.name}, which raymoe did not write; "
                    "choose another directory"
                )

    def number(self, part: Location) -> int:
        """Return the place of a part in the order."""
        match = self._match(part.name)
        assert match is not None
        return int(match["number"])

    def next_number(self) -> int:
        """Return the number after that of the last part, from 0."""
        parts = self.find()
        return 1 + self.number(parts[-1]) if parts else 0

    @contextlib.contextmanager
    def writing(self, number: int) -> Iterator[IO[bytes]]:
        """Yield the file of a part; the part is there when the block has ended."""
        run = f"-{self.run}" if self.run else ""
        with self.directory.child(f"{PREFIX}{number:06d}{run}{self.suffix}").replacing() as file:
            yield file

    def _is_part(self, name: str) -> bool:
        return self._match(name) is not None

    def _match(self, name: str) -> re.Match[str] | None:
        suffix = re.escape(self.suffix)
        return re.fullmatch(rf"{PREFIX}(?P<number>\d+)(-[0-9a-f]+)?{suffix}", name)
