"""Presets of nodes: the names that users write, and numbers that agree with data sheets."""

from pathlib import Path

import pytest

from raymoe.errors import ConfigError, UnknownOptionError
from raymoe.specs.hardware import (
    HARDWARE_PRESETS,
    find_hardware,
    hardware_preset,
    preset_of_gpu,
)
from raymoe.units import GIB

# GB/s of device memory, dense 16-bit TFLOP/s, GB/s of the link, GB of device memory: data sheets.
DATA_SHEETS = {
    "t4": (320, 65, 16, 16),
    "l4": (300, 121, 32, 24),
    "a10": (600, 125, 32, 24),
    "a5000": (768, 111, 32, 24),
    "a6000": (768, 155, 32, 48),
    "a40": (696, 150, 32, 48),
    "l40s": (864, 362, 32, 48),
    "4090": (1008, 165, 32, 24),
    "a100": (2039, 312, 32, 80),
    "h100": (3350, 989, 64, 80),
    "h200": (4800, 989, 64, 141),
}


def test_the_documented_names_exist() -> None:
    assert HARDWARE_PRESETS.keys() == DATA_SHEETS.keys()


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_a_node_sustains_a_large_part_of_its_data_sheet_and_never_more(name: str) -> None:
    node = hardware_preset(name)
    read, flop, link, memory = DATA_SHEETS[name]
    assert 0.6 * read <= node.gpu_bytes_per_s / 1e9 <= 0.9 * read
    assert 0.35 * flop <= node.gpu_flop_per_s / 1e12 <= 0.9 * flop
    assert 0.35 * link <= node.htod_bytes_per_s / 1e9 <= 0.9 * link
    assert 0.35 * link <= node.dtoh_bytes_per_s / 1e9 <= 0.9 * link
    assert 0.9 * memory * 1e9 <= node.gpu_memory_bytes <= memory * GIB


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_the_host_feeds_its_link(name: str) -> None:
    node = hardware_preset(name)
    assert node.name == name
    assert node.htod_bytes_per_s < node.host_bytes_per_s
    assert node.host_copy_bytes_per_s < node.host_bytes_per_s / 2  # one read and one write at least
    assert node.host_memory_bytes > node.gpu_memory_bytes


def test_case_of_letters_does_not_matter() -> None:
    assert hardware_preset("A100") is HARDWARE_PRESETS["a100"]


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="unknown hardware preset 'l40'; did you mean 'l4"):
        hardware_preset("l40")


def test_hardware_is_found_by_preset_or_file(tmp_path: Path) -> None:
    assert find_hardware("L4") is HARDWARE_PRESETS["l4"]
    hardware_preset("t4").to_file(tmp_path / "l4.json")
    assert find_hardware(str(tmp_path / "l4.json")) == HARDWARE_PRESETS["t4"]
    with pytest.raises(ConfigError, match=r"hardware file l4\.json: cannot be read"):
        find_hardware("l4.json")
    with pytest.raises(ConfigError, match=r"hardware file nodes/l4: cannot be read"):
        find_hardware("nodes/l4")


@pytest.mark.parametrize(
    ("names", "preset"),
    [
        (("Tesla T4", "NVIDIA T4G"), "t4"),
        (("NVIDIA L4",), "l4"),
        (("NVIDIA A10", "NVIDIA A10G"), "a10"),
        (("NVIDIA RTX A5000",), "a5000"),
        (("NVIDIA RTX A6000",), "a6000"),
        (("NVIDIA A40",), "a40"),
        (("NVIDIA GeForce RTX 4090",), "4090"),
        (("NVIDIA L40S",), "l40s"),
        (("NVIDIA A100-SXM4-80GB",), "a100"),
        (("NVIDIA H100 80GB HBM3",), "h100"),
        (("NVIDIA H200",), "h200"),
    ],
)
def test_a_card_is_recognised_by_every_name_of_its_driver(
    names: tuple[str, ...], preset: str
) -> None:
    assert {preset_of_gpu(name) for name in names} == {HARDWARE_PRESETS[preset]}


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA RTX 5000 Ada Generation", "NVIDIA L40", "NVIDIA H20", "NVIDIA GH200 480GB", "",
        "NVIDIA A40-48Q", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090",
        "NVIDIA A100 80GB PCIe", "A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL", "NVIDIA H200 NVL",
    ],
)  # fmt: skip
def test_parts_of_a_card_and_other_cards_are_not_taken_for_it(name: str) -> None:
    assert preset_of_gpu(name) is None
