"""What is left of a former run? Its manifest beside the output, and its journal.

answers/                     parts, or answers.jsonl: only rows, so that any reader takes it
answers.manifest.json        what the rows were generated with; stays
answers.journal/             rows that finished; removed when all are in the output
answers.status/              how the latest run does, or did; stays
answers.report.html          the same as a page; stays

A journal grows, which files of object stores cannot: for an output there, it has a directory of
its own or is not kept. The last two are then beside the journal, or not kept either.
"""

from dataclasses import dataclass
from pathlib import Path

from raymoe.cli.storage import Location
from raymoe.data import manifest as manifests
from raymoe.data.inside import inside_files
from raymoe.data.journal import journal_files, make_journal_directory
from raymoe.data.manifest import FILE_NAME, Manifest
from raymoe.data.status.files import check_status, clear_status, report_beside, status_beside
from raymoe.errors import ConfigError
from raymoe.report.page import is_report
from raymoe.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Remains:
    """The files beside an output.

    Attributes:
        output: Directory or file of the rows.
        journal: Directory of the rows that have finished; None where there can be none.
    """

    output: Location
    journal: Path | None

    @classmethod
    def of(cls, output: Location, journal_dir: str | None = None) -> "Remains":
        """Return what is beside an output.

        Args:
            output: Directory or file of the rows.
            journal_dir: Where its journal is; None is beside a local output, else nowhere.

        Raises:
            ConfigError: The journal would be among the rows, or on an object store.
        """
        if journal_dir is None:
            beside = output.sibling(f"{output.name}.journal")
            return cls(output=output, journal=beside.local_path if output.is_local else None)
        journal = Location.parse(journal_dir)
        if not journal.is_local:
            raise ConfigError(
                f"--journal {journal}: a journal grows row by row, which files of object stores "
                "cannot; give a directory of a file system that all nodes share"
            )
        if output.is_local and journal.local_path.is_relative_to(output.local_path):
            raise ConfigError(f"--journal {journal} is in the output; choose another directory")
        return cls(output=output, journal=journal.local_path)

    @property
    def manifest(self) -> Location:
        """What the output was generated with."""
        return self.output.sibling(f"{self.output.name}.manifest.json")

    @property
    def status(self) -> Path | None:
        """Directory of what actors and driver say of the latest run; None where there can be none.

        Beside a local output, else beside the journal.
        """
        if self.output.is_local:
            return status_beside(self.output.local_path)
        return None if self.journal is None else status_beside(self.journal)

    @property
    def report(self) -> Path | None:
        """The page that shows it."""
        return None if self.status is None else report_beside(self.status)

    @property
    def journal_bytes(self) -> int:
        """Size of the rows in the journal."""
        return sum(path.stat().st_size for path in self._row_files())

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
            if self.manifest.exists():
                manifests.compare(self._read_manifest(), manifest, where=self.manifest)
            if self.journal is not None and (self.journal / FILE_NAME).exists():
                manifests.check(self.journal / FILE_NAME, manifest)
        if not (resume or overwrite) and self._row_files():
            raise ConfigError(
                f"{self.journal} holds {format_bytes(self.journal_bytes)} of rows of a run that "
                "was not finished; add --resume (with --id-column) to go on with it or --overwrite "
                "to start anew"
            )

    def prepare(self, manifest: Manifest | None, *, resume: bool, has_journal: bool = True) -> None:
        """Write the manifest beside the output and into the journal, or compare with what is there.

        Raises:
            ConfigError: The journal's directory cannot be made, or belongs to another job; or
                nothing can be written where the output shall be.
        """
        if self.status is not None:
            clear_status(self.status)
        if not resume:
            self._remove_journal()
            if self.manifest.exists():
                self.manifest.delete()
        if self.manifest.exists():
            found = self._read_manifest()
            manifest = manifest or found
            manifests.compare(found, manifest, where=self.manifest)
        elif manifest is not None:
            self._write_manifest(manifest)
        self.output.check_writable()
        if has_journal and self.journal is not None:
            make_journal_directory(self.journal)
            if manifest is not None:
                manifests.claim(self.journal / FILE_NAME, manifest)

    def finish(self) -> None:
        """Keep the manifest and remove the journal: all its rows are in the output."""
        in_journal = None if self.journal is None else self.journal / FILE_NAME
        if in_journal is not None and in_journal.exists() and not self.manifest.exists():
            self._write_manifest(manifests.read(in_journal))
        self._remove_journal()

    def _read_manifest(self) -> Manifest:
        with self.manifest.explained("read"):
            data = self.manifest.read_bytes()
        return manifests.parse(data, where=self.manifest)

    def _write_manifest(self, manifest: Manifest) -> None:
        # The first file of a job: what cannot be written now is wrong, not away.
        with self.manifest.replacing(retry_after_s=()) as file:
            file.write(manifests.as_bytes(manifest))

    def _check_ours(self) -> None:
        journal = self.journal
        if journal is not None:
            if journal.is_symlink() or (journal.exists() and not journal.is_dir()):
                raise ConfigError(f"{journal} is not a directory; move it away")
            others = sorted(set(journal.glob("*")) - set(self._journal_files()))
            if others:
                raise ConfigError(
                    f"{journal} holds {others[0].name}, which raymoe did not write; move it away"
                )
        if self.status is not None:
            check_status(self.status)
        if self.report is not None and self.report.exists() and not is_report(self.report):
            raise ConfigError(f"{self.report} is no report of raymoe; move it away")
        if self.manifest.exists():
            is_file = self.manifest.is_file()
            if not is_file or not manifests.is_manifest(self.manifest.read_bytes()):
                raise ConfigError(f"{self.manifest} is no manifest of raymoe; move it away")

    def _row_files(self) -> list[Path]:
        return [] if self.journal is None else list(journal_files(self.journal))

    def _journal_files(self) -> list[Path]:
        """Everything that raymoe writes into the directory."""
        if self.journal is None:
            return []
        unfinished = self.journal.glob(f".{FILE_NAME}.*.tmp")
        known = [*self._row_files(), *inside_files(self.journal)]
        known += [self.journal / FILE_NAME, *unfinished]
        return [path for path in known if path.exists()]

    def _remove_journal(self) -> None:
        for path in self._journal_files():
            path.unlink()
        if self.journal and self.journal.is_dir() and not any(self.journal.iterdir()):
            self.journal.rmdir()
