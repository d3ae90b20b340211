"""What Ray Data calls before each pipeline of this process starts; needs no Ray itself."""

import os

VARIABLE = "RAY_DATA_EXECUTION_CALLBACKS"  # read for each pipeline, also for one made before


def register_callback(name: str) -> None:
    """Have Ray Data call an `ExecutionCallback`, given as ``module.Class``; idempotent."""
    given = os.environ.get(VARIABLE, "")  # noqa: TID251 - a list of Ray's and no setting of ours
    names = [each for each in given.split(",") if each]
    if name not in names:
        os.environ[VARIABLE] = ",".join([*names, name])  # noqa: TID251 - as above
