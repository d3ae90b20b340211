"""Answers as values of an output schema."""

from pathlib import Path

from raymoe.config import SamplingParams
from raymoe.engine.outputs import Generation
from raymoe.engine.workers.process import WorkerProcess
from raymoe.errors import ConfigError, in_step
from raymoe.output_schema import OutputSchema
from raymoe.units import GIB

WORKER = Path(__file__).parent / "workers" / "schema_worker.py"
LOAD_LIMIT_S = 60.0  # CPU time
CHECK_LIMIT_S = 1.0  # CPU time for one answer; usual ones take 1 ms
MAX_MEMORY_BYTES = GIB


class AnswerReader:
    """Reads answers; thread-safe.

    An answer that followed the schema while it was generated is valid and is not checked again.
    Another, of a row with a constraint of its own, is checked in a helper process within limits,
    as patterns and answers together may need any time. It starts with the first such answer.
    """

    def __init__(self, schema: OutputSchema, check_limit_s: float = CHECK_LIMIT_S) -> None:
        self._schema, self._limit_s = schema, check_limit_s
        self._worker = WorkerProcess(
            WORKER,
            {"schema": schema.text},
            what="the check of an answer",
            load_cpu_s=LOAD_LIMIT_S,
            memory_bytes=MAX_MEMORY_BYTES,
        )

    def read(self, generation: Generation, params: SamplingParams) -> Generation:
        """Return an answer and its samples with their values.

        Args:
            params: Those that it was generated with.

        Raises:
            WorkerProcessError: The helper process was ended from outside.
            ExecutionError: This object was closed.
        """
        form = params.structured_outputs_params
        is_enforced = form is not None and form.json == self._schema.text
        with in_step("reading an answer"):
            return generation.parsed_as(self._schema, None if is_enforced else self._find_problem)

    def close(self) -> None:
        self._worker.close()

    def _find_problem(self, text: str) -> str:
        try:
            answer, _ = self._worker.ask({"text": text}, cpu_s=self._limit_s)
        except ConfigError as error:  # such as a limit: the answer stays, without a value
            return f"$: {error}"
        return str(answer["problem"])
