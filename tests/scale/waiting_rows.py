"""Rows for waiting engines: made where they are needed, and checked when they come back."""

import json

import numpy as np
import pyarrow as pa

from raymoe.data.columns import ERROR_COLUMN
from raymoe.errors import ExecutionError
from raymoe.specs.workload import Workload

ID_COLUMN = "id"
_SPREAD = 1_000_003  # a prime: neighbours differ in length
_LENGTHS = 101


def make_rows(table: pa.Table, *, workload: Workload) -> pa.Table:
    """Turn ids into rows; a byte is a token.

    Prompt lengths are spread evenly over the mean +- 25 %, generated tokens over +- 50 %. No two
    prompts begin the same.
    """
    ids = table.column(ID_COLUMN).to_pylist()
    prompts, params = [], []
    for row in ids:
        share = row * _SPREAD % _LENGTHS / (_LENGTHS - 1)  # 0..1
        length = max(1, round(workload.prompt_tokens * (0.75 + 0.5 * share)))
        tokens = max(1, round(workload.generated_tokens * (1.5 - share)))
        prompts.append((f"{row} " + "x" * length)[:length])
        params.append(json.dumps({"max_tokens": tokens}))
    return pa.table(
        {
            ID_COLUMN: table.column(ID_COLUMN),
            "prompt": pa.array(prompts, pa.string()),
            "sampling_params": pa.array(params, pa.string()),
        }
    )


class RowCheck:
    """Sees every row that comes out; needs a byte for each.

    Args:
        num_rows: Ids are 0 to one less.
    """

    def __init__(self, num_rows: int) -> None:
        self._seen = np.zeros(num_rows, np.uint8)

    def add(self, table: pa.Table) -> None:
        """Take a block.

        Raises:
            ExecutionError: It has an error row.
        """
        np.add.at(self._seen, table.column(ID_COLUMN).to_numpy(), 1)
        errors = [error for error in table.column(ERROR_COLUMN).to_pylist() if error]
        if errors:
            raise ExecutionError(f"{len(errors)} rows of a block are error rows: {errors[0]}")

    def finish(self) -> None:
        """Hold that every id came out once.

        Raises:
            ExecutionError: With how many did not, and one of them.
        """
        for what, wrong in (("missing", self._seen == 0), ("there twice", self._seen > 1)):
            if wrong.any():
                raise ExecutionError(
                    f"{int(wrong.sum())} of {len(wrong)} ids are {what}, such as "
                    f"{int(wrong.argmax())}"
                )
