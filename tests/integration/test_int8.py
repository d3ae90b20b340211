"""Products of int8 in whole models: quantised while they are loaded, and W8A8 checkpoints."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from raymoe.config import EngineConfig
from raymoe.engine.engine import Engine
from raymoe.errors import ConfigError
from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.memory.arena import HostArena
from raymoe.memory.int8_weights import Int8Weights, int8_model
from raymoe.memory.weights import WeightStore
from raymoe.model.decoder import Decoder
from raymoe.model.loading import decoder_arena_bytes
from raymoe.plan.policy import Policy
from raymoe.rotation import input_run, rotated
from raymoe.specs.model import ModelSpec
from raymoe.specs.module_patterns import name_or_expression
from raymoe.specs.weight_format import Int8Channel
from tests.parity.cases import get_case
from tests.parity.configurations import Configuration, first_of_each_family
from tests.parity.driver import Driver, load_decoder
from tests.parity.fields import BASE
from tests.parity.oracle import make_model
from tests.quantised_checkpoints import checkpoints
from tests.quantisers import quantise

pytestmark = pytest.mark.skipif(
    not packed_linear_is_used(torch.bfloat16), reason="these cores have no products of int8"
)
LINEAR = functional.linear
NUM_EXPERTS = 4
FIELDS = BASE | {
    "hidden_size": 256, "intermediate_size": 200, "head_dim": 32, "num_hidden_layers": 3,
    "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2,
}  # fmt: skip
POLICY = Policy(
    max_num_seqs=8, max_num_batched_tokens=128, max_prefill_chunk_tokens=64, num_kv_blocks=40
)
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
            "input_activations": {
                "num_bits": 8, "type": "int", "strategy": "token", "dynamic": True,
                "symmetric": True,
            },
        }
    },
}  # fmt: skip


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(199, (n,), generator=generator).tolist() for n in (1, 40, 17, 33, 8)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mixtral of bfloat16 weights."""
    directory = tmp_path_factory.mktemp("int8") / "plain"
    configuration = Configuration(name="int8", family="mixtral", fields=FIELDS, seed=3)
    make_model(configuration).to(torch.bfloat16).save_pretrained(directory)
    return directory


def write_w8a8(
    plain: Path, directory: Path, scale_dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """The same model in int8; `ignore` names modules that are not."""
    ignored = config.get("ignore", [])
    shutil.copytree(plain, directory)
    tensors = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if (
            not name.endswith(
                ("_proj.weight", "w1.weight", "w2.weight", "w3.weight", "head.weight")
            )
            or module in ignored
        ):
            tensors[name] = weight
        else:
            found = quantise(Int8Channel(), weight.float(), scale_dtype=scale_dtype)
            tensors |= {module + suffix: tensor for suffix, tensor in found.tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    written = json.loads((directory / "config.json").read_text())
    written["quantization_config"] = W8A8 | config
    (directory / "config.json").write_text(json.dumps(written))
    return directory


def int8_decoder(directory: Path, *left_out: str, is_rotated: bool = True) -> Decoder:
    """What an engine with compute_dtype="int8" loads; its arena is as large as planned.

    Args:
        left_out: Parts of names of modules that stay as they are.
        is_rotated: As an engine has them, and not as W8A8 checkpoints do.
    """
    spec = ModelSpec.from_directory(directory)
    store = WeightStore.open(spec, directory)
    int8 = int8_model(spec)
    assert int8.quantization is not None
    others = tuple(name_or_expression(f"re:.*{part}.*") for part in left_out)
    excluded = (*int8.quantization.excluded, *others)
    stored = Int8Channel(is_rotated=is_rotated)
    int8 = replace(int8, quantization=replace(int8.quantization, format=stored, excluded=excluded))
    weights = Int8Weights(store, spec, int8)
    num_bytes = decoder_arena_bytes(int8, torch.bfloat16, weights)
    arena = HostArena(num_bytes)
    decoder = Decoder.load(
        int8, weights, arena.allocate, torch.bfloat16, release=weights.drop_pages
    )
    assert arena.used_bytes == num_bytes
    return decoder


def logits_of(decoder: Decoder) -> Tensor:
    rows = prompts()
    return Driver(decoder, rows, 1).run_step([(0, len(row)) for row in rows]).float()


def fake_quantised(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, is_rotated: bool
) -> Tensor:
    """A linear layer in int8, in float64 but for that; routers stay as they are."""
    if len(weight) == NUM_EXPERTS:
        return LINEAR(x, weight, bias)
    run = input_run(weight.shape[1]) if is_rotated else 1

    def rounded(matrix: Tensor) -> Tensor:
        numbers = rotated(matrix, run).double()
        scales = numbers.abs().amax(-1, keepdim=True) / 127
        return (numbers / scales.clamp_min(1e-30)).round() * scales

    out = rounded(x) @ rounded(weight).T / run
    return (out if bias is None else out + bias.double()).to(x.dtype)


@functools.cache
def of_transformers(
    directory: Path, *, is_quantised: bool = False, is_rotated: bool = False
) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    )
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        if is_quantised:
            linear = functools.partial(fake_quantised, is_rotated=is_rotated)
            patch.setattr(functional, "linear", linear)
        return torch.cat([model(torch.tensor([row])).logits[0] for row in prompts()]).float()


def error(got_TV: Tensor, want_TV: Tensor) -> float:
    """Of the median token: rounding decides which experts some choose."""
    return float(((got_TV - want_TV).norm(dim=1) / want_TV.norm(dim=1)).median())


def test_logits_are_those_of_transformers_with_quantised_layers(plain: Path) -> None:
    got_TV = logits_of(int8_decoder(plain))
    exact_TV = of_transformers(plain)
    quantised_TV = of_transformers(plain, is_quantised=True, is_rotated=True)
    bf16_TV = logits_of(load_decoder(plain, torch.bfloat16))
    assert error(got_TV, exact_TV) > 2 * error(bf16_TV, exact_TV)  # it is not the plain model
    assert error(got_TV, quantised_TV) < 0.6 * error(quantised_TV, exact_TV)


def generate(directory: Path, **options: Any) -> list[tuple[int, ...]]:
    config = EngineConfig(linger_s=0.0, policy=POLICY, device="cpu", dtype="bfloat16", **options)
    with Engine.from_pretrained(directory, config) as engine:
        rows = engine.generate(prompts(), GREEDY)
    assert [row.error for row in rows] == [""] * len(rows)
    return [row.token_ids for row in rows]


def test_a_checkpoint_of_int8_gives_what_quantising_its_weights_gives(
    plain: Path, tmp_path: Path
) -> None:
    """To the bit: with the same scales, and no rotation, all matrices are the same."""
    stored = write_w8a8(plain, tmp_path / "w8a8")
    want_TV = logits_of(int8_decoder(plain, is_rotated=False))
    assert torch.equal(logits_of(load_decoder(stored, torch.bfloat16)), want_TV)
    results = [generate(stored), generate(plain, compute_dtype="int8"), generate(plain)]
    assert results[0] == generate(stored, compute_dtype="int8")
    assert len(set(map(tuple, results))) == len(results)


def test_modules_that_a_checkpoint_leaves_out_are_not_quantised(
    plain: Path, tmp_path: Path
) -> None:
    ignored = ["lm_head", *(f"model.layers.{i}.self_attn.k_proj" for i in range(3))]
    stored = write_w8a8(plain, tmp_path / "w8a8", ignore=ignored)
    got_TV = logits_of(load_decoder(stored, torch.bfloat16))
    same = int8_decoder(plain, "lm_head", "k_proj", is_rotated=False)
    assert torch.equal(got_TV, logits_of(same))
    assert not torch.equal(got_TV, logits_of(int8_decoder(plain, is_rotated=False)))


def test_scales_may_be_of_bfloat16(plain: Path, tmp_path: Path) -> None:
    stored = write_w8a8(plain, tmp_path / "w8a8", torch.bfloat16)
    got_TV = logits_of(load_decoder(stored, torch.bfloat16))
    exact_TV = of_transformers(plain)
    quantised_TV = of_transformers(plain, is_quantised=True)
    assert error(got_TV, quantised_TV) < 0.9 * error(quantised_TV, exact_TV)


def test_float32_computes_with_the_numbers_of_the_weights(plain: Path, tmp_path: Path) -> None:
    stored = write_w8a8(plain, tmp_path / "w8a8")
    tensors = load_file(stored / "model.safetensors")
    shutil.copytree(plain, tmp_path / "numbers")
    numbers = {
        name: tensor.float() * tensors[f"{name}_scale"] if tensor.dtype == torch.int8 else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale")
    }
    assert sum(tensor.dtype == torch.int8 for tensor in tensors.values()) == 1 + 3 * (4 + 3 * 4)
    save_file(numbers, tmp_path / "numbers" / "model.safetensors")
    want_TV = logits_of(load_decoder(tmp_path / "numbers"))
    torch.testing.assert_close(logits_of(load_decoder(stored)), want_TV, rtol=1e-4, atol=1e-3)


def test_a_tied_head_is_a_matrix_of_its_own(tmp_path: Path) -> None:
    fields = FIELDS | {"tie_word_embeddings": True}
    configuration = Configuration(name="tied", family="mixtral", fields=fields, seed=4)
    make_model(configuration).to(torch.bfloat16).save_pretrained(tmp_path)
    logits_TV = logits_of(int8_decoder(tmp_path))
    assert error(logits_TV, logits_of(load_decoder(tmp_path, torch.bfloat16))) < 0.2
    assert generate(tmp_path, compute_dtype="int8") != generate(tmp_path)


def test_weights_take_about_half_the_memory(plain: Path) -> None:
    spec = ModelSpec.from_directory(plain)
    store, int8 = WeightStore.open(spec, plain), int8_model(spec)
    sizes = [decoder_arena_bytes(each, torch.bfloat16, store) for each in (spec, int8)]
    assert 0.5 < sizes[1] / sizes[0] < 0.56


QUICK = {"deepseek_v3", "qwen3_next", "gpt_oss", "nemotron_h", "deepseek_v4", "gemma4_text"}


@pytest.mark.parametrize(
    "configuration",
    [
        pytest.param(each, marks=() if each.family in QUICK else pytest.mark.slow)
        for each in first_of_each_family()
    ],
    ids=lambda each: each.family,
)
def test_every_family_runs(configuration: Configuration) -> None:
    case = get_case(configuration.name)
    plain_TV = logits_of(load_decoder(case.directory, torch.bfloat16))
    int8_TV = logits_of(int8_decoder(case.directory))
    assert int8_TV.isfinite().all()
    assert 0 < error(int8_TV, plain_TV) < 0.6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "auto"}, "the device is 'auto'; cores alone"),
        ({"device": "cuda"}, "the device is 'cuda'; cores alone"),
        ({"dtype": "float32"}, "dtype is 'float32'; all else is computed in bfloat16"),
        ({"compute_dtype": "int4"}, "compute_dtype is 'int4'; it must be one of auto, int8"),
    ],
)
def test_configurations_without_such_products_are_refused(
    options: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**{"compute_dtype": "int8", "device": "cpu"} | options)


def test_models_without_such_products_are_refused(plain: Path, tmp_path: Path) -> None:
    int8 = EngineConfig(compute_dtype="int8", device="cpu")
    configuration = Configuration(name="wide", family="mixtral", fields=FIELDS, seed=4)
    make_model(configuration).save_pretrained(tmp_path / "float32")
    with pytest.raises(ConfigError, match=r"computes in torch.float32 .* takes dtype='bfloat16'"):
        Engine.from_pretrained(tmp_path / "float32", int8)
    stored = write_w8a8(plain, tmp_path / "w8a8")
    with pytest.raises(ConfigError, match=r"\(W8A8\), which cores alone multiply"):
        Engine.from_pretrained(stored, EngineConfig(device="emulated"))


def test_other_formats_are_not_quantised_again() -> None:
    config = EngineConfig(compute_dtype="int8", device="cpu", dtype="bfloat16")
    stored = checkpoints("gptq, act-order, zero points").quantised
    with pytest.raises(ConfigError, match="is stored as gptq; leave compute_dtype out"):
        Engine.from_pretrained(stored, config)
