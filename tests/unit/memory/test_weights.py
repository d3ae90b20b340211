import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raymoe.errors import CheckpointError
from raymoe.memory.checkpoint import MAX_TENSORS, Checkpoint
from raymoe.memory.weights import WeightStore, max_stored_tensors
from raymoe.specs.files import INDEX_FILE
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS, model_preset
from raymoe.specs.weight_names import model_weights
from tests.parity.configurations import CONFIGURATIONS, Configuration
from tests.parity.oracle import make_checkpoint

MIXTRAL = CONFIGURATIONS[0]
TIED = next(c for c in CONFIGURATIONS if c.name == "llama: llama3 rope, tied")


def save(configuration: Configuration, directory):
    model = make_checkpoint(configuration, directory)
    return ModelSpec.from_directory(directory), model.state_dict()


def rewrite(directory, change) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_weights_are_those_of_the_model(tmp_path) -> None:
    spec, state = save(MIXTRAL, tmp_path)
    store = WeightStore.open(spec, tmp_path)
    for name, shape in model_weights(spec).items():
        assert store(name).shape == shape
    fused = state["model.layers.1.mlp.experts.gate_up_proj"][3]
    up = store("model.layers.1.mlp.experts.3.up_proj.weight")
    assert torch.equal(up, fused[spec.layers[1].ffn.expert_hidden :])
    assert torch.equal(store("lm_head.weight"), state["lm_head.weight"])
    assert store.dtype == torch.float32


def test_fused_experts_on_disk_give_the_same_weights(tmp_path) -> None:
    spec, state = save(MIXTRAL, tmp_path)
    names = [name for name in model_weights(spec) if ".mlp." in name]
    separate = WeightStore.open(spec, tmp_path)
    expected = {name: separate(name).clone() for name in names}
    del separate
    save_file(dict(state), tmp_path / "model.safetensors")
    store = WeightStore.open(spec, tmp_path)
    assert store.checkpoint.entry("model.layers.0.mlp.experts.down_proj").shape[0] == 4
    for name in names:
        assert torch.equal(store(name), expected[name]), name


def test_sharded_checkpoints_give_the_same_weights(tmp_path) -> None:
    model = make_checkpoint(MIXTRAL, tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    spec = ModelSpec.from_directory(tmp_path / "one")
    one, many = (WeightStore.open(spec, tmp_path / name) for name in ("one", "many"))
    assert all(torch.equal(one(name), many(name)) for name in model_weights(spec))


def test_files_of_another_checkpoint_too_give_the_tensors_of_the_index(tmp_path, caplog) -> None:
    spec, _ = save(MIXTRAL, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "all.safetensors")
    index = dict.fromkeys(load_file(tmp_path / "all.safetensors"), "all.safetensors")
    wanted = WeightStore.open(spec, sharded(tmp_path, index))
    other = {"model.layers.7.mlp.weight": torch.ones(2)}
    tensors = load_file(tmp_path / "all.safetensors")
    save_file(tensors | other, tmp_path / "all.safetensors")
    found = WeightStore.open(spec, tmp_path)
    assert "1 tensors that the index does not name are not read" in caplog.text
    assert all(torch.equal(found(name), wanted(name)) for name in model_weights(spec))
    # transformers reads what its files hold, whatever the index names.
    del index["model.norm.weight"]
    save_file(tensors, sharded(tmp_path, index) / "all.safetensors")
    assert WeightStore.open(spec, tmp_path)("model.norm.weight").shape == (spec.hidden_size,)


def sharded(directory: Path, index: dict[str, str]) -> Path:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return directory


def test_dropping_pages_of_experts_keeps_their_values(tmp_path) -> None:
    spec, _ = save(MIXTRAL, tmp_path)
    store = WeightStore.open(spec, tmp_path)
    names = list(model_weights(spec))
    sums = [store(name).sum() for name in names]
    store.drop_pages(names)
    assert [store(name).sum() for name in names] == sums


@pytest.mark.parametrize("head", ["lm_head.weight", "model.lm_head.weight"])
def test_a_tied_head_that_equals_the_embedding_is_accepted(tmp_path, head: str) -> None:
    spec, _ = save(TIED, tmp_path)
    rewrite(tmp_path, lambda t: t.update({head: t["model.embed_tokens.weight"].clone()}))
    WeightStore.open(spec, tmp_path)


@pytest.mark.parametrize("head", ["lm_head.weight", "model.lm_head.weight"])
def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path, head: str) -> None:
    spec, _ = save(TIED, tmp_path)
    rewrite(tmp_path, lambda t: t.update({head: t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointError, match=f"'{head}' differs"):
        WeightStore.open(spec, tmp_path)


def test_quantized_tensors_are_refused_by_name(tmp_path) -> None:
    spec, _ = save(TIED, tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(tmp_path, lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{name}.*I8"):
        WeightStore.open(spec, tmp_path)


def test_missing_and_foreign_tensors_are_refused_by_name(tmp_path) -> None:
    spec, _ = save(TIED, tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.vision.weight": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*vision"):
        WeightStore.open(spec, tmp_path)
    rewrite(tmp_path, lambda t: (t.pop("model.vision.weight"), t.pop("model.norm.weight")))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*missing"):
        WeightStore.open(spec, tmp_path)


def test_weights_of_another_configuration_are_refused_by_shape(tmp_path) -> None:
    save(TIED, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    spec = ModelSpec.from_config(config | {"intermediate_size": 40})
    with pytest.raises(CheckpointError, match=r"gate_proj.*56, 48.*40, 48"):
        WeightStore.open(spec, tmp_path)


def write_header(path, entries: list[str]) -> None:
    header = ("{" + ",".join(entries) + "}").encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)


def empty(name: str) -> str:
    return f'"{name}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'


def test_headers_of_more_tensors_than_the_model_can_have_are_not_read(tmp_path) -> None:
    spec, _ = save(MIXTRAL, tmp_path)
    path = tmp_path / "model.safetensors"
    # Less than a second of checks and a few MiB each, where a million took 25 s and 1.3 GiB.
    write_header(path, [empty(f"t{index}") for index in range(20_000)])
    with pytest.raises(CheckpointError, match=r"about 20001 tensors, at most \d+ may be here"):
        WeightStore.open(spec, tmp_path)
    write_header(path, [empty("x" * 20_000_000)])
    with pytest.raises(CheckpointError, match=r"header of 20000\d+ bytes, at most \d+ are allowed"):
        WeightStore.open(spec, tmp_path)


def test_an_index_longer_than_the_model_needs_is_not_read(tmp_path) -> None:
    spec, _ = save(MIXTRAL, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = {f"t{index}": "a.safetensors" for index in range(300_000)}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(CheckpointError, match=r"index\.json: larger than"):
        WeightStore.open(spec, tmp_path)


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_the_largest_published_models_may_have_all_their_tensors(name) -> None:
    spec = model_preset(name)
    # Five for each matrix of a model quantised by groups, which no larger one has yet.
    assert max_stored_tensors(spec) >= 5 * len(model_weights(spec))
    assert max_stored_tensors(spec) <= MAX_TENSORS


@pytest.mark.slow
def test_all_tensors_of_deepseek_v3_may_stand_in_one_file(tmp_path) -> None:
    spec = model_preset("deepseek-v3")
    matrices = list(model_weights(spec))
    names = [*matrices, *(f"{name}_scale_inv" for name in matrices)]
    write_header(tmp_path / "model.safetensors", [empty(name) for name in names])
    checkpoint = Checkpoint.open(tmp_path, max_stored_tensors(spec))
    assert len(checkpoint.names()) == 2 * len(matrices) > 90_000
