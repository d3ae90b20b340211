"""From the files of a status to a page."""

import time
import uuid
from pathlib import Path

from raymoe.data import manifest as manifests
from raymoe.data.manifest import Manifest
from raymoe.data.status.files import SUFFIX, manifests_beside, read_status
from raymoe.data.status.view import JobView
from raymoe.errors import ConfigError
from raymoe.report import sections
from raymoe.report.page import is_report, page


def write_report(status_dir: Path, path: Path) -> None:
    """Write the report of a job, whole or not at all.

    Args:
        status_dir: Of the job, while it runs or after it.
        path: Of the page; a former report is replaced.

    Raises:
        ConfigError: The path is a file of something else.
        OSError: It cannot be written.
    """
    if path.exists() and not is_report(path):
        raise ConfigError(f"{path} is there and no report of raymoe; choose another file")
    view = JobView.of(read_status(status_dir), time.time())
    name = status_dir.name.removesuffix(SUFFIX)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        temporary.write_text(make_report(view, name, find_manifest(status_dir)), encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def make_report(view: JobView, name: str, manifest: Manifest | None = None) -> str:
    """The page of a job.

    Args:
        view: What is known of it.
        name: For the heading.
        manifest: What its tokens depend on, if it is there.
    """
    parts = (
        sections.summary(view),
        sections.errors(view),
        sections.pictures(view),
        sections.accuracy(view),
        sections.roofline(view),
        sections.actors(view),
        sections.settings(view, manifest),
    )
    return page(f"raymoe: {name}", sections.when(view), filter(None, parts))


def find_manifest(status_dir: Path) -> Manifest | None:
    """The manifest beside a status, if there is one that can be read."""
    for path in manifests_beside(status_dir):
        if path.is_file():
            try:
                return manifests.read(path)
            except ConfigError:  # of another version: the page has the rest
                continue
    return None
