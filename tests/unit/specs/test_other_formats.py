"""Directories that hold no model in safetensors: the error names what is there, and what to do."""

import json
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import ones

from raymoe.config import EngineConfig
from raymoe.data.generator import check_options
from raymoe.engine.tokenizer import Tokenizer
from raymoe.errors import CheckpointError
from raymoe.memory.checkpoint import Checkpoint
from raymoe.specs.files import check_adapter, read_config
from raymoe.specs.model import ModelSpec

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "some-org/some-model", "r": 8}
CONFIG = {
    "model_type": "llama",
    "vocab_size": 9,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
# Files -> what the message says of them.
OTHERS = {
    ("model-Q4_K_M.gguf",): r"Q4_K_M.*llama\.cpp \(GGUF\).*gguf_file",
    ("ggml-model-q4_0.gguf.part1of2",): "GGUF",
    ("consolidated.safetensors", "params.json", "tekken.json"): "format of its publisher.*transfor",
    ("consolidated.00.pth", "params.json", "tokenizer.model"): "format of its publisher",
    ("weights.npz", "tokenizer.json"): "weights.npz holds a model of MLX.*converted from",
    ("mlc-chat-config.json", "params_shard_0.bin"): "MLC",
    ("openvino_model.bin", "openvino_model.xml"): "OpenVINO",
    (
        "pytorch_model-00001-of-00002.bin",
        "training_args.bin",
    ): r"pytorch_model.*pickled.*save_pretr",
    ("__0_0.distcp", "training_args.bin"): "FSDP",
    ("tf_model.h5",): "TensorFlow.*from_tf",
    ("flax_model.msgpack",): "Flax",
    ("model.onnx", "model.onnx_data"): "ONNX",
    ("model.tflite",): "another runtime",
}


def with_files(directory: Path, names: tuple[str, ...], config: dict | None = None) -> Path:
    for name in names:
        (directory / name).write_bytes(b"\0" * 16)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("names", OTHERS, ids=lambda names: names[0])
def test_weights_of_other_formats_are_named(tmp_path: Path, names: tuple[str, ...]) -> None:
    with_files(tmp_path, names)
    with pytest.raises(CheckpointError, match=rf"no config\.json; .*{OTHERS[names]}"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match=f"no weights in safetensors; .*{OTHERS[names]}"):
        Checkpoint.open(with_files(tmp_path, (), CONFIG))


def test_states_of_a_training_are_no_weights(tmp_path: Path) -> None:
    with_files(tmp_path, ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"))
    with pytest.raises(CheckpointError, match=r"no config\.json; give a model's directory"):
        read_config(tmp_path)


def test_the_directory_inside_that_holds_the_model_is_named(tmp_path: Path) -> None:
    for step in (500, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        with_files(tmp_path / f"checkpoint-{step}", (), CONFIG)
    with pytest.raises(CheckpointError, match="checkpoint-1000 has one; give that directory"):
        read_config(tmp_path)


def test_a_pointer_of_git_lfs_is_named_in_every_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"config\.json.*pointer of Git LFS.*git lfs pull"):
        read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a pointer of Git LFS"):
        Checkpoint.open(tmp_path)
    for name in ("tokenizer.json", "tokenizer.model"):
        (tmp_path / name).write_text(POINTER)
        with pytest.raises(CheckpointError, match=rf"{name}: a pointer of Git LFS"):
            Tokenizer(tmp_path, vocab_size=9)
        (tmp_path / name).unlink()


def test_an_adapter_alone_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    save_file({"a": ones(2)}, tmp_path / "adapter_model.safetensors")
    expected = r"adapter \(LORA\) of the model some-org/some-model.*no model.*as adapter"
    with pytest.raises(CheckpointError, match=expected):
        ModelSpec.from_directory(tmp_path)


def test_an_adapter_beside_a_model_is_refused_unless_it_is_to_be_ignored(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(ADAPTER))
    with_files(tmp_path, (), CONFIG)
    with pytest.raises(CheckpointError, match=r"adapter.*beside config\.json.*ignore_adapter"):
        check_adapter(tmp_path)
    with pytest.raises(CheckpointError, match="ignore_adapter"):
        check_options(tmp_path, {})
    check_options(tmp_path, {"engine_config": {"ignore_adapter": True}})
    check_options(tmp_path, {"engine_config": EngineConfig(ignore_adapter=True)})


def test_weights_of_mlx_are_named(tmp_path: Path) -> None:
    with_files(tmp_path, (), CONFIG | {"quantization": {"group_size": 64, "bits": 4}})
    with pytest.raises(CheckpointError, match=r"config\.json: quantised by MLX.*converted from"):
        read_config(tmp_path)
