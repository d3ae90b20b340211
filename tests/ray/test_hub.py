"""Jobs with a model of a hub: refused before an actor starts, downloaded once a node."""

import pytest
import ray
import ray.data

import raymoe
from raymoe import CheckpointError, MoEEngineProcessorConfig, UnsupportedModelError
from raymoe.download.models import find_files, find_model
from tests.hub import used_hub

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.filterwarnings("ignore:Use 'expr' instead of 'fn':UserWarning"),
]
DEMO = raymoe.demo_model_path()
NUM_ROWS = 64


def rows():
    return ray.data.from_items(
        [{"id": i, "prompt": f"date: {i} May 2021"} for i in range(NUM_ROWS)]
    )


CALLS = {
    "generate": lambda model: raymoe.generate(rows(), model),
    "map_batches_kwargs": raymoe.map_batches_kwargs,
    "build_processor": lambda model: raymoe.build_processor(
        MoEEngineProcessorConfig(model_source=model)
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_cannot_run_is_refused_before_an_actor_starts(local_ray, tmp_path, call) -> None:
    with used_hub(tmp_path) as hub:
        hub.put("org/gated", DEMO, token="yours", is_gated=True)
        hub.put("org/mamba", {"config.json": b'{"model_type": "mamba"}', "model.safetensors": b""})
        for name, match in (("org/missing", "no model"), ("org/gated", "gated")):
            with pytest.raises(CheckpointError, match=match):
                call(name)
        with pytest.raises(UnsupportedModelError, match="'mamba' is not supported"):
            call("org/mamba")
        assert hub.downloads() == []


def test_a_template_is_checked_with_what_the_token_of_actors_opens(local_ray, tmp_path) -> None:
    with used_hub(tmp_path / "driver") as hub:
        hub.put("org/demo", DEMO, token="mine", is_gated=True)
        env = {"env_vars": {**hub.environment(tmp_path / "node"), "HF_TOKEN": "mine"}}
        with pytest.raises(CheckpointError, match="gated"):
            raymoe.generate(rows(), "org/demo", prompt_template="{{ id }}")
        raymoe.generate(rows(), "org/demo", prompt_template="{{ id }}", runtime_env=env)


def test_actors_of_a_node_download_a_model_once_with_their_own_token(local_ray, tmp_path) -> None:
    """The driver has none, and plans by what a node fetches; journals know models by content."""

    def answers(model, **options):
        config = MoEEngineProcessorConfig(
            model_source=str(model), concurrency=2, batch_size=8, chat_template_stage=False,
            engine_kwargs={"num_threads": 1}, **options,
        )  # fmt: skip
        sampling = {"max_tokens": 4, "temperature": 0.0}
        process = raymoe.build_processor(
            config,
            preprocess=lambda row: {**row, "sampling_params": sampling},
            builder_kwargs={"id_column": "id", "journal_dir": tmp_path / "journal"},
        )
        return {row["id"]: row["generated_text"] for row in process(rows()).take_all()}

    with used_hub(tmp_path / "driver") as hub:
        hub.put("org/demo", DEMO, token="mine", is_gated=True)
        token = {"HF_TOKEN": "mine"}
        env = {"env_vars": hub.environment(tmp_path / "node") | token}
        texts = answers("org/demo", runtime_env=env)
        assert len(hub.downloads()) == 1
        assert find_files("org/demo") is not None
        assert find_model("org/demo") is None
    assert len(texts) == NUM_ROWS
    assert answers(DEMO) == texts
