"""What is left of a former run? Its manifest and its journal, beside the output.

answers/                     parts, or answers.jsonl: only rows, so that any reader takes it
answers.manifest.json        what the rows were generated with; stays
answers.journal/             rows that finished; removed when all are in the output
"""

from dataclasses import dataclass
from pathlib import Path

from raymoe.data import manifest as manifests
from raymoe.data.inside import inside_files
from raymoe.data.journal import journal_files, make_directory
from raymoe.data.manifest import FILE_NAME, Manifest
from raymoe.errors import ConfigError
from raymoe.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Remains:
    """The files beside an output.

    Attributes:
        output: Directory or file of the rows.
    """

    output: Path

    @property
    def manifest(self) -> Path:
        """What the output was generated with."""
        return self.output.with_name(f"{self.output.name}.manifest.json")

    @property
    def journal(self) -> Path:
        """Directory of the rows that have finished."""
        return self.output.with_name(f"{self.output.name}.journal")

    @property
    def journal_bytes(self) -> int:
        """Size of the rows in the journal."""
        return sum(path.stat().st_size for path in journal_files(self.journal))

    def check(self, manifest: Manifest | None, *, resume: bool, overwrite: bool) -> None:
        """Refuse to lose what a former run did, or to mix it with something else.

        Args:
            manifest: Of this run; None where the model is not on this machine: the actors will
                compare then.
            resume: Continue the former run.
            overwrite: Give it up.

        Raises:
            ConfigError: A run was not finished and nothing says what to do with it; or this run
                cannot continue it, with each difference; or files of others are in the way.
        """
        self._check_ours()
        if resume and manifest is not None:
            for path in (self.manifest, self.journal / FILE_NAME):
                if path.exists():
                    manifests.check(path, manifest)
        if not (resume or overwrite) and journal_files(self.journal):
            raise ConfigError(
                f"{self.journal} holds {format_bytes(self.journal_bytes)} of rows of a run that "
                "was not finished; add --resume (with --id-column) to go on with it or --overwrite "
                "to start anew"
            )

    def prepare(self, manifest: Manifest | None, *, resume: bool, has_journal: bool = True) -> None:
        """Write the manifest beside the output and into the journal, or compare with what is there.

        Raises:
            ConfigError: The journal's directory cannot be made, or belongs to another job.
        """
        if not resume:
            self._remove_journal()
            self.manifest.unlink(missing_ok=True)
        if manifest is None and self.manifest.exists():
            manifest = manifests.read(self.manifest)
        if manifest is not None:
            manifests.claim(self.manifest, manifest)
        if has_journal:
            make_directory(self.journal)
            if manifest is not None:
                manifests.claim(self.journal / FILE_NAME, manifest)

    def finish(self) -> None:
        """Keep the manifest and remove the journal: all its rows are in the output."""
        in_journal = self.journal / FILE_NAME
        if in_journal.exists() and not self.manifest.exists():
            manifests.write(self.manifest, manifests.read(in_journal))
        self._remove_journal()

    def _check_ours(self) -> None:
        if self.journal.is_symlink() or (self.journal.exists() and not self.journal.is_dir()):
            raise ConfigError(f"{self.journal} is not a directory; move it away")
        others = sorted(set(self.journal.glob("*")) - set(self._journal_files()))
        if others:
            raise ConfigError(
                f"{self.journal} holds {others[0].name}, which raymoe did not write; move it away"
            )
        if self.manifest.exists() and not manifests.is_manifest(self.manifest):
            raise ConfigError(f"{self.manifest} is no manifest of raymoe; move it away")

    def _journal_files(self) -> list[Path]:
        """Everything that raymoe writes into the directory."""
        unfinished = self.journal.glob(f".{FILE_NAME}.*.tmp")
        known = [*journal_files(self.journal), *inside_files(self.journal)]
        known += [self.journal / FILE_NAME, *unfinished]
        return [path for path in known if path.exists()]

    def _remove_journal(self) -> None:
        for path in self._journal_files():
            path.unlink()
        if self.journal.is_dir() and not any(self.journal.iterdir()):
            self.journal.rmdir()
