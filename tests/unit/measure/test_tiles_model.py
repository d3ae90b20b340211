"""Tiles of a model: its experts as they are stored, every bucket, kept ones not again."""

from functools import partial

import pytest
import torch

from raymoe.cli import run
from raymoe.errors import ConfigError
from raymoe.kernels.gpu_experts_layout import BUCKETS, TileShape, TileTable
from raymoe.measure.tiles import ExpertLayer, measure_layer
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS

HOST = torch.device("cpu")
GPT_OSS = {
    **MODEL_PRESETS["gpt-oss-20b"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_local_experts": 8,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
DEEPSEEK = {
    **MODEL_PRESETS["deepseek-v2-lite"],
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}


def layer_of(config: dict[str, object], max_bytes: float = 1e9) -> ExpertLayer:
    (layer,) = ExpertLayer.each(ModelSpec.from_config(config), torch.bfloat16, HOST, max_bytes)
    return layer


def test_experts_are_stored_as_those_of_the_model() -> None:
    layer = layer_of(GPT_OSS)
    layouts = layer.matrices.layouts()
    assert layouts is not None
    assert {layout.kind for layout in layouts} == {"e2m1"}
    assert layer.matrices.num_experts == 8
    assert layer.matrices.biases is not None
    assert layer_of(DEEPSEEK).moe.expert_hidden == 32, "the first layer is dense"


def test_every_format_of_a_model_has_a_layer() -> None:
    quantisation = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.1"],
    }
    config = {**DEEPSEEK, "num_hidden_layers": 4, "quantization_config": quantisation}
    spec = ModelSpec.from_config(config)
    layers = list(ExpertLayer.each(spec, torch.bfloat16, HOST, 1e9))
    assert [layer.format_name for layer in layers] == ["bfloat16", "fp8_block"]


def test_no_more_experts_than_fit_and_at_least_those_of_a_token() -> None:
    expert_bytes = 3 * 64 * 32 * 2
    assert layer_of(DEEPSEEK, 7.5 * expert_bytes).matrices.num_experts == 7
    with pytest.raises(ConfigError, match=r"5 experts of .* a token uses 6"):
        layer_of(DEEPSEEK, 5.5 * expert_bytes)
    dense = ModelSpec.from_config({**DEEPSEEK, "first_k_dense_replace": 2})
    with pytest.raises(ConfigError, match="has no experts"):
        next(ExpertLayer.each(dense, torch.bfloat16, HOST, 1e9))


def test_where_the_kernels_are_not_used_it_says_what_they_need() -> None:
    with pytest.raises(ConfigError, match=r"capability 7\.5 or newer, silu"):
        layer_of(DEEPSEEK).check_kernels()


def test_every_bucket_is_measured_once() -> None:
    layer = layer_of(DEEPSEEK)
    calls: list[int] = []

    def time_call(call: partial[torch.Tensor]) -> float:
        hidden_TH = call.args[0]
        if len(hidden_TH) < 4:  # the others take a CPU long
            assert call().shape == hidden_TH.shape
        calls.append(len(hidden_TH))
        return 2.0 if len(calls) % 3 else 1.0

    steps = list(measure_layer(layer, TileTable(capability=(9, 0)), time_call))
    assert [step.tokens_per_expert for step in steps] == list(BUCKETS)
    assert sorted(set(calls)) == [-(-8 * bucket // 6) for bucket in BUCKETS]
    assert all((step.usual_s, step.best_s) == (2.0, 1.0) for step in steps)
    last = steps[-1].tiles
    layouts = layer.matrices.layouts()
    assert layouts is not None
    for step in steps:
        assert last.shape(layouts[0], step.tokens_per_expert) == step.shape
    num_calls = len(calls)
    assert not list(measure_layer(layer, last, time_call))
    assert len(calls) == num_calls
    again = measure_layer(layer, last, time_call, is_again=True)
    assert next(again).tokens_per_expert == BUCKETS[0]
    assert isinstance(steps[0].shape, TileShape)


def test_on_turing_in_float16_only_few_tokens_have_tiles() -> None:
    spec = ModelSpec.from_config(DEEPSEEK)
    (layer,) = ExpertLayer.each(spec, torch.float16, HOST, 1e9)
    assert layer.buckets((7, 5)) == (1, 16)
    assert layer.buckets((8, 0)) == BUCKETS


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiles", "--model", "mixtral-8x7b"], "torch sees no GPU"),
        (["--tiles"], "--tiles needs --model"),
        (["--model", "mixtral-8x7b"], "is for --tiles"),
        (["--tiles", "--model", "mixtrl"], "did you mean"),
    ],
)
def test_what_is_missing_is_said(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
