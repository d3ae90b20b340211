"""What the driver does for the journals of a pipeline: holds leases, says how rows are known."""

import logging
from typing import Any

from ray.data._internal.execution.execution_callback import ExecutionCallback

from raymoe.data.before_start import as_users_error, named_options
from raymoe.data.bucket import Bucket
from raymoe.data.bucket_lease import BucketLease
from raymoe.errors import RaymoeError

logger = logging.getLogger("ray.data.raymoe")  # INFO of Ray Data's loggers is shown


class UseJournals(ExecutionCallback):  # type: ignore[misc]  # Ray has no types here
    """Has the lease of each journal in a bucket while a pipeline runs."""

    def __init__(self) -> None:
        self._leases: dict[str, BucketLease] = {}

    def before_execution_starts(self, executor: Any) -> None:
        # These are private in Ray, which has no public equivalent; its versions are pinned.
        stages = [logical for operator in executor._topology  # noqa: SLF001
                  for logical in operator._logical_operators]  # noqa: SLF001  # fmt: skip
        try:
            for options in filter(None, map(named_options, stages)):
                if options.get("journal_dir") is not None:
                    self._use(str(options["journal_dir"]), has_ids=bool(options.get("id_column")))
        except RaymoeError as error:
            self._release()
            raise as_users_error(error) from None

    def on_execution_step(self, executor: Any) -> None:  # noqa: ARG002 - Ray's interface
        try:
            for lease in self._leases.values():
                lease.check()
        except RaymoeError as error:
            raise as_users_error(error) from None

    def after_execution_succeeds(self, executor: Any) -> None:  # noqa: ARG002
        self._release()

    def after_execution_fails(self, executor: Any, error: Exception) -> None:  # noqa: ARG002
        self._release()

    def _use(self, journal_dir: str, *, has_ids: bool) -> None:
        if not has_ids:
            logger.info(
                "journal_dir without an id_column: a row is known by what its answer depends on, "
                "and equal rows by how many there are"
            )
        if "://" in journal_dir and journal_dir not in self._leases:
            lease = BucketLease(Bucket.parse(journal_dir, "journal_dir"))
            lease.take()
            self._leases[journal_dir] = lease

    def _release(self) -> None:
        while self._leases:
            self._leases.popitem()[1].release()
