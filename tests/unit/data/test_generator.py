"""What naming the operator costs a driver, and when it may end its process."""

import os
import subprocess
import sys
from pathlib import Path

import raymoe
from raymoe.data.generator import should_leave_process


def test_a_driver_that_names_the_operator_loads_no_torch():
    script = (
        "import sys, raymoe; raymoe.MoEGenerator, raymoe.map_batches_kwargs\n"
        "assert not {'torch', 'numba', 'transformers'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(raymoe.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)


def test_a_process_that_is_no_ray_actor_is_never_ended():
    assert not should_leave_process(is_restart_useful=True)
    assert not should_leave_process(is_restart_useful=False)
