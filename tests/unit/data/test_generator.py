"""What naming the operator costs a driver, and when it may end its process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raymoe
from raymoe.data import generator
from raymoe.data.generator import MoEGenerator, check_arguments, should_leave_process
from raymoe.device import find_gpu
from raymoe.errors import CheckpointError, ConfigError


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


WRONG = [
    (("m",), {"sampling_param": {}}, "did you mean 'sampling_params'?"),
    ((), {"model": "m"}, "did you mean 'model_source'?"),
    ((), {"seed": 1}, "MoEGenerator has no model_source; give a local model directory"),
    (
        ("m",),
        {"max_tokens": 3},
        "it belongs to sampling_params: give sampling_params={'max_tokens': 3}",
    ),
    (("m",), {"dtype": "float32"}, "it belongs to engine_config: give engine_config={'dtype': "),
    (("m", {"max_tokens": 3}), {}, "only model_source may be given without its name"),
    (("m",), {"model_source": "n"}, "multiple values for argument 'model_source'"),
]


@pytest.mark.parametrize(("args", "kwargs", "message"), WRONG)
def test_wrong_arguments_are_named_by_the_class_and_by_the_check_on_the_driver(
    args, kwargs, message
):
    for refuse in (lambda: MoEGenerator(*args, **kwargs), lambda: check_arguments(args, kwargs)):
        with pytest.raises(ConfigError, match=re.escape(message)):
            refuse()


def test_an_actor_that_holds_a_gpu_does_not_run_on_the_cpu_unasked(monkeypatch, tmp_path):
    monkeypatch.setattr(generator, "_has_gpu_of_ray", lambda: True)
    monkeypatch.setattr(find_gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"holds a GPU, but torch sees none: .*the device 'cpu'"):
        MoEGenerator(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        MoEGenerator(tmp_path, engine_config={"device": "cpu"})


def test_arguments_are_known_by_name_however_they_are_given():
    assert check_arguments(["m"], {"seed": 3}) == {"model_source": "m", "seed": 3}
    assert check_arguments((), {"model_source": "m"}) == {"model_source": "m"}
