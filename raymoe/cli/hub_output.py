"""An output in a data set of the hub: rows are kept here until they are all there, then sent.

The hub makes a commit of whatever is written and takes some hundred commits an hour, so that parts,
lease and manifest of a job cannot be there. They are in a directory of this machine, as those of a
local output, and one commit puts the complete output on the hub.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self
from urllib.parse import quote

import huggingface_hub
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.hf_api import RepoFile

from raymoe.cli.resume import ResumeState
from raymoe.cli.storage import Location, not_empty
from raymoe.download.datasets import PREFIX, DatasetUri, is_dataset
from raymoe.download.hub import explained
from raymoe.errors import CheckpointError, ConfigError, ExecutionError

DIRECTORY = "hf-datasets"  # in the one where the command runs


@dataclass(frozen=True, slots=True)
class HubOutput:
    """A file or directory of a data set on the hub, which a job shall write."""

    uri: DatasetUri

    @classmethod
    def of(cls, output: str) -> Self | None:
        """Return what an output names; None for one that is not on the hub.

        Raises:
            ConfigError: It names no place in a data set.
        """
        if not is_dataset(output):
            return None
        uri = DatasetUri.parse(output)
        parts = uri.path.split("/")
        if uri.config is not None or uri.split is not None or {"", ".", ".."} & set(parts):
            raise ConfigError(
                f"--output {output}: name a place in the dataset, such as "
                f"{PREFIX}{uri.name}/answers or {PREFIX}{uri.name}/answers.jsonl"
            )
        return cls(uri)

    def __str__(self) -> str:
        return f"{PREFIX}{self._repository}/{self.uri.path}"

    @property
    def _repository(self) -> str:
        revision = "" if self.uri.revision is None else f"@{quote(self.uri.revision, safe='')}"
        return self.uri.name + revision

    @property
    def working(self) -> Location:
        """Where the rows are until the job has ended, on this machine."""
        return Location.local(Path(DIRECTORY, self._repository, self.uri.path))

    def check_apart(self, input_: str) -> None:
        """Refuse an output in the directory that is read; raises `ConfigError`."""
        if not is_dataset(input_):
            return
        read = DatasetUri.parse(input_)
        is_same = (read.name, read.revision) == (self.uri.name, self.uri.revision)
        if is_same and PurePosixPath(self.uri.path).is_relative_to(read.path):
            raise ConfigError(
                f"--output {self} lies in the input {input_}; choose another, or name the input's "
                "files by a glob"
            )

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Make sure before the job that its rows may be sent, and replace no others.

        Raises:
            ConfigError: This user may not write there, or something is there.
        """
        try:
            with explained(self.uri.name, kind="dataset"):
                hub = huggingface_hub.HfApi()
                hub.auth_check(self.uri.name, repo_type="dataset", write=True)
                found = self._files()
        except CheckpointError as error:
            is_missing = type(error.__cause__) is RepositoryNotFoundError
            new = f"; make a new one by 'hf repos create {self.uri.name} --repo-type dataset'"
            raise ConfigError(
                f"--output {self} cannot be written: {error}{new if is_missing else ''}"
            ) from error
        goes_on = resume and ResumeState.of(self.working).manifest.exists()
        if found and not overwrite and not goes_on:
            raise ConfigError(not_empty(str(self), f"{len(found):,} files on the hub"))

    def send(self) -> str:
        """Put the output on the hub in one commit, in place of what was there.

        Returns:
            The address of the commit.

        Raises:
            ExecutionError: It cannot be sent; the rows are on this machine.
        """
        working = self.working
        files = working.files() if working.is_dir() else [working]
        sent = {self.uri.path + file.path.removeprefix(working.path): file.path for file in files}
        try:
            with explained(self.uri.name, kind="dataset"):
                old = [name for name in self._files() if name not in sent]
                commit = huggingface_hub.HfApi().create_commit(
                    self.uri.name,
                    [
                        *(huggingface_hub.CommitOperationAdd(*item) for item in sent.items()),
                        *(huggingface_hub.CommitOperationDelete(name) for name in old),
                    ],
                    commit_message=f"Add {self.uri.path} by raymoe generate",
                    repo_type="dataset",
                    revision=self.uri.revision,
                )
        except CheckpointError as error:
            raise ExecutionError(
                f"the output is whole in {working}, and could not be sent to {self}: {error}; the "
                "same command with --resume sends it"
            ) from error
        return str(commit.commit_url)

    def _files(self) -> list[str]:
        """Return what is at this place: one file, those of a directory, or none."""
        hub, place, revision = huggingface_hub.HfApi(), self.uri.path, self.uri.revision
        found = hub.get_paths_info(self.uri.name, place, revision=revision, repo_type="dataset")
        if not found or isinstance(found[0], RepoFile):
            return [each.path for each in found]
        tree = hub.list_repo_tree(
            self.uri.name, place, recursive=True, revision=revision, repo_type="dataset"
        )
        return [each.path for each in tree if isinstance(each, RepoFile)]
