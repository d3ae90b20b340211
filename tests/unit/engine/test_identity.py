"""The identity of a model: equal for equal contents, wherever they lie; different for others."""

import json
import os
import shutil
import time

import pytest
from safetensors import safe_open

from raymoe.engine import identity
from raymoe.engine import identity as identities
from raymoe.engine.identity import ModelIdentity
from raymoe.errors import CheckpointError
from tests.tiny import make_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model") / "original")


@pytest.fixture
def model(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy")


DIGESTS = ("config", "weights", "tokenizer", "chat_template")


def changed_digests(original, model):
    before, now = ModelIdentity.of(original), ModelIdentity.of(model)
    return [name for name in DIGESTS if getattr(before, name) != getattr(now, name)]


def test_a_copy_is_the_same_model(original, model):
    assert changed_digests(original, model) == []
    identity = ModelIdentity.of(model)
    assert (identity.directory, identity.name, identity.revision) == (model, str(model), None)
    assert identity.dtype == "float32"


def test_other_weights_of_the_same_size_are_another_model(original, tmp_path):
    other = make_checkpoint(tmp_path / "other", seed=1)
    assert changed_digests(original, other) == ["weights"]


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_each_file_changes_what_depends_on_it(original, model):
    edit_json(model / "generation_config.json", eos_token_id=5)
    assert changed_digests(original, model) == ["config"]
    edit_json(model / "tokenizer_config.json", bos_token="<pad>")
    assert changed_digests(original, model) == ["config", "tokenizer"]
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert changed_digests(original, model) == ["config", "tokenizer", "chat_template"]


def test_a_template_with_a_name_is_a_template_of_the_model(original, model):
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    assert changed_digests(original, model) == ["chat_template"]


def test_a_template_in_the_configuration_of_the_tokenizer_is_only_the_template(original, model):
    edit_json(model / "tokenizer_config.json", chat_template="{{ messages }}")
    assert changed_digests(original, model) == ["chat_template"]


def test_a_snapshot_of_the_hub_has_its_name_and_revision(original, tmp_path):
    place = tmp_path / "models--some--model" / "snapshots" / "0123abcd"
    shutil.copytree(original, place)
    identity = ModelIdentity.of(place)
    assert (identity.name, identity.revision) == ("some/model", "0123abcd")
    assert changed_digests(original, place) == []


def test_a_directory_that_is_only_called_like_a_snapshot_has_no_revision(original, tmp_path):
    place = shutil.copytree(original, tmp_path / "snapshots" / "step-100")
    identity = ModelIdentity.of(place)
    assert (identity.name, identity.revision) == (str(place), None)


def test_a_link_out_of_the_directory_is_refused(model):
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.json").symlink_to("/etc/passwd")
    with pytest.raises(CheckpointError, match="leaves the model directory"):
        ModelIdentity.of(model)


def tensor_offsets(path):
    """Where the data of each tensor begins."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}


def edit_byte(path, offset):
    """Change one byte and nothing else that a user can set."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_one_byte_of_any_tensor_makes_another_model(model):
    path = model / "model.safetensors"
    seen = {ModelIdentity.of(model).weights}
    offsets = tensor_offsets(path)
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(offsets)
    for offset in offsets.values():
        key = identities.files_key(model)
        edit_byte(path, offset)
        assert identities.files_key(model) != key
        seen.add(ModelIdentity.of(model).weights)
    assert len(seen) == 1 + len(offsets)


@pytest.fixture
def read_paths(monkeypatch):
    """Files whose bytes were hashed."""
    paths, digest = [], identity._digest
    monkeypatch.setattr(identity, "_digest", lambda path: (paths.append(path), digest(path))[1])
    return paths


def age(path):
    """Let a file look as if it had not changed lately; only the clock does it for real."""
    time.sleep(0.01)
    return path


def test_what_was_read_is_kept_until_a_file_changes(model, read_paths, monkeypatch):
    monkeypatch.setattr(identity, "STABLE_NS", 0)
    path = model / "model.safetensors"
    first = ModelIdentity.of(age(model)).weights
    assert ModelIdentity.of(model).weights == first
    assert read_paths == [path]
    edit_byte(path, path.stat().st_size - 1)
    assert ModelIdentity.of(age(model)).weights != first
    assert read_paths == [path, path]


def test_a_file_that_has_just_changed_is_not_kept(model, read_paths):
    assert ModelIdentity.of(model).weights == ModelIdentity.of(model).weights
    assert len(read_paths) == 2


@pytest.mark.parametrize("content", ["", "[]", "{", "not text \udcff", '{"1-2-3-4-5": 7}'])
def test_a_broken_cache_is_read_over(model, read_paths, monkeypatch, content):
    monkeypatch.setattr(identity, "STABLE_NS", 0)
    cache = model / identity.CACHE_NAME
    cache.write_bytes(content.encode(errors="surrogateescape"))
    first = ModelIdentity.of(age(model)).weights
    assert ModelIdentity.of(model).weights == first
    assert len(read_paths) == 1
    assert all(len(digest) == 64 for digest in json.loads(cache.read_text()).values())


def test_a_cache_that_others_can_write_is_not_believed(model, read_paths, monkeypatch):
    monkeypatch.setattr(identity, "STABLE_NS", 0)
    state = identity.file_state(model / "model.safetensors")
    cache = model / identity.CACHE_NAME
    cache.write_text(json.dumps({state: "0" * 64}))
    cache.chmod(0o666)
    ModelIdentity.of(age(model))
    assert len(read_paths) == 1


def test_blobs_of_the_hub_cache_are_known_by_their_names(original, tmp_path, read_paths):
    root = tmp_path / "models--some--model"
    blobs, place = root / "blobs", root / "snapshots" / "0123abcd"
    shutil.copytree(original, place)
    blobs.mkdir()
    plain = ModelIdentity.of(original).weights
    read_paths.clear()
    (name,) = identity.read_digests([original / "model.safetensors"], []).values()
    (place / "model.safetensors").rename(blobs / name)
    (place / "model.safetensors").symlink_to(f"../../blobs/{name}")
    read_paths.clear()
    assert ModelIdentity.of(place).weights == plain
    assert read_paths == []


def test_weights_that_change_while_they_are_read_are_refused(model, monkeypatch):
    path, digest = model / "model.safetensors", identity._digest

    def read(file):
        found = digest(file)
        edit_byte(path, path.stat().st_size - 1)
        return found

    monkeypatch.setattr(identity, "_digest", read)
    with pytest.raises(CheckpointError, match="has changed while it was read"):
        _ = ModelIdentity.of(model).weights


def test_large_weights_are_read_in_the_background_and_only_if_wanted(model, monkeypatch):
    expected = ModelIdentity.of(model).weights
    monkeypatch.setattr(identities, "SMALL_BYTES", 0)
    assert not ModelIdentity.of(model, reads_weights=False).has_weights
    assert ModelIdentity.of(model).weights == expected


def test_a_model_that_changes_while_it_is_loaded_is_refused(model):
    identity = ModelIdentity.of(model)
    identity.check_unchanged()
    edit_byte(model / "model.safetensors", 5000)
    with pytest.raises(CheckpointError, match="have changed while they were loaded"):
        identity.check_unchanged()
