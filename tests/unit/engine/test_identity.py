"""The identity of a model: equal for equal contents, wherever they lie; different for others."""

import json
import shutil

import pytest

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
