"""HardwareSpec: a node has all numbers of a GPU or none, and comes back from its file."""

import dataclasses
import json
from pathlib import Path

import pytest

from raymoe.errors import ConfigError
from raymoe.specs.files import to_json
from raymoe.specs.hardware import (
    DEVICE_FIELDS,
    HOST_FIELDS,
    Curve,
    DeviceCurves,
    HardwareSpec,
    HostCurves,
)

HOST = HardwareSpec(
    name="host", num_cores=2, host_memory_bytes=1, host_bytes_per_s=1.0, host_flop_per_s=1.0
)
NEEDED = (*DEVICE_FIELDS, "host_copy_bytes_per_s")
GPU = dataclasses.replace(HOST, **dict.fromkeys(NEEDED, 1))
RATE = Curve(((1, 5e9), (16, 8.25e10)))
HOST_CURVES = HostCurves(
    product_flop_per_s=RATE,
    expert_flop_per_s=RATE,
    attention_bytes_per_s=RATE,
    attention_flop_per_s=1.4e11,
    attention_bytes_per_s_of_threads=Curve(((1, 2e10),)),
    prefill_flop_per_s=RATE,
    activation_bytes_per_s=9e9,
)
DEVICE_CURVES = DeviceCurves(
    product_flop_per_s=RATE,
    expert_flop_per_s=RATE,
    pageable_htod_bytes_per_s=6e9,
    pageable_dtoh_bytes_per_s=5e9,
    duplex_htod_bytes_per_s=11e9,
    duplex_dtoh_bytes_per_s=10e9,
    busy_htod_bytes_per_s=9e9,
    busy_attention_bytes_per_s=1.5e10,
    attention_bytes_per_s=RATE,
    tasks_per_s=2e4,
)
MEASURED = dataclasses.replace(GPU, host_curves=HOST_CURVES, device_curves=DEVICE_CURVES)


def test_a_node_has_a_gpu_only_when_its_numbers_are_given() -> None:
    assert not HOST.has_gpu
    assert GPU.has_gpu


@pytest.mark.parametrize("value", [0, -1, float("nan")])
@pytest.mark.parametrize("field", NEEDED)
def test_one_missing_number_of_the_gpu_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"HardwareSpec\.{field} is"):
        dataclasses.replace(GPU, **{field: value})


@pytest.mark.parametrize("field", DEVICE_FIELDS)
def test_one_number_of_a_gpu_alone_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match="on a node with a GPU all of"):
        dataclasses.replace(HOST, **{field: 1})


@pytest.mark.parametrize("spec", [HOST, GPU], ids=["host", "gpu"])
@pytest.mark.parametrize("field", HOST_FIELDS)
def test_numbers_of_the_host_are_positive(field: str, spec: HardwareSpec) -> None:
    with pytest.raises(ConfigError, match=rf"HardwareSpec\.{field} is 0"):
        dataclasses.replace(spec, **{field: 0})


def test_a_host_without_a_gpu_may_know_how_fast_it_copies() -> None:
    assert not dataclasses.replace(HOST, host_copy_bytes_per_s=1e9).has_gpu
    with pytest.raises(ConfigError, match="host_copy_bytes_per_s is -1"):
        dataclasses.replace(HOST, host_copy_bytes_per_s=-1)


@pytest.mark.parametrize("field", HOST_FIELDS)
def test_numbers_are_finite(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"{field} is inf; it must be positive and finite"):
        dataclasses.replace(HOST, **{field: float("inf")})


def test_curves_of_a_gpu_need_a_gpu() -> None:
    with pytest.raises(ConfigError, match="device_curves is given, but there is no GPU"):
        dataclasses.replace(HOST, device_curves=DEVICE_CURVES)


@pytest.mark.parametrize("spec", [HOST, GPU, MEASURED], ids=["host", "gpu", "measured"])
def test_a_node_comes_back_from_its_file(spec: HardwareSpec, tmp_path: Path) -> None:
    spec.to_file(tmp_path / "node.json")
    assert HardwareSpec.from_file(tmp_path / "node.json") == spec


def edited(tmp_path: Path, **fields: object) -> Path:
    """The file of `MEASURED` with some fields replaced; `None` leaves one out."""
    path = tmp_path / "node.json"
    MEASURED.to_file(path)
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


def test_fields_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    path = edited(tmp_path, host_curves=None, device_curves=None)
    assert HardwareSpec.from_file(path) == GPU


@pytest.mark.parametrize("field", ["name", *HOST_FIELDS])
def test_a_missing_field_is_refused_by_name_and_file(field: str, tmp_path: Path) -> None:
    path = edited(tmp_path, **{field: None})
    with pytest.raises(ConfigError, match=rf"node\.json: HardwareSpec has no field '{field}'"):
        HardwareSpec.from_file(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_core": 2}, "unknown field of HardwareSpec 'num_core'; did you mean 'num_cores'"),
        ({"num_cores": 2.5}, "num_cores is 2.5; it takes a whole number"),
        ({"num_cores": True}, "num_cores is True; it takes a whole number"),
        ({"num_cores": 0}, r"HardwareSpec\.num_cores is 0; it must be positive"),
        ({"host_bytes_per_s": "fast"}, "host_bytes_per_s is 'fast'; it takes a number"),
        ({"name": 4}, "name is 4; it takes text"),
        ({"host_curves": 3}, "host_curves holds int; it takes an object"),
        ({"host_curves": {}}, "host_curves has no field 'product_flop_per_s'"),
        ({"gpu_bytes_per_s": 0}, "gpu_bytes_per_s is 0.0; on a node with a GPU"),
    ],
)
def test_a_file_with_a_value_without_meaning_is_refused(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"hardware file .*node\.json: .*{message}"):
        HardwareSpec.from_file(edited(tmp_path, **fields))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([[1, 2], [1, 3]], "must ascend"),
        ([[1, 2, 3]], "it takes 2 entries"),
        ([1], "points is 1; it takes a list"),
        ([], "points is empty"),
        ([[0, 1]], "must be positive and finite"),
    ],
)
def test_a_curve_in_a_file_is_checked(points: object, message: str, tmp_path: Path) -> None:
    curves = json.loads(to_json(HOST_CURVES)) | {"expert_flop_per_s": {"points": points}}
    with pytest.raises(ConfigError, match=message):
        HardwareSpec.from_file(edited(tmp_path, host_curves=curves))


def test_what_is_no_file_of_this_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json: cannot be read"):
        HardwareSpec.from_file(tmp_path / "absent.json")
    for text in ("{", "[]", '{"name": "a", "name": "b"}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match=r"hardware file .*bad\.json"):
            HardwareSpec.from_file(tmp_path / "bad.json")
