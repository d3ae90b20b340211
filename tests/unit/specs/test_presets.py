"""Presets: the names that users write, and numbers that agree with data sheets and model cards."""

import pytest

from raymoe.errors import UnknownOptionError
from raymoe.specs.presets_hardware import HARDWARE_PRESETS, hardware_preset
from raymoe.specs.presets_models import MODEL_PRESETS, model_preset
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
SIZES = {
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (140.6, 39.2),
    "qwen3-30b-a3b": (30.5, 3.4),
    "qwen3-235b-a22b": (235.1, 22.2),
}


def test_the_documented_names_exist() -> None:
    assert HARDWARE_PRESETS.keys() == DATA_SHEETS.keys()
    assert MODEL_PRESETS.keys() == SIZES.keys()


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


@pytest.mark.parametrize("name", SIZES)
def test_models_have_their_published_billions_of_parameters(name: str) -> None:
    model = model_preset(name)
    total, active = SIZES[name]
    assert model.name == name
    assert round(model.num_parameters / 1e9, 1) == total
    assert round(model.num_active_parameters / 1e9, 1) == active


def test_case_of_letters_does_not_matter() -> None:
    assert hardware_preset("A100") is HARDWARE_PRESETS["a100"]
    assert model_preset("Mixtral-8x7B") == model_preset("mixtral-8x7b")


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownOptionError, match="unknown hardware preset 'l40'; did you mean 'l4"):
        hardware_preset("l40")
    with pytest.raises(UnknownOptionError, match="did you mean 'mixtral-8x7b'"):
        model_preset("mixtral-8x7")
