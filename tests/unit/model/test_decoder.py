import json
from dataclasses import replace

import pytest
import torch

from raymoe.device.threads import set_num_threads
from raymoe.memory.arena import HostArena
from raymoe.memory.weights import WeightStore
from raymoe.model.decoder import Decoder
from raymoe.model.loading import decoder_arena_bytes
from raymoe.specs.attention.kind import OutputGate
from raymoe.specs.attention.ngrams import NGRAM_MULTIPLIERS, NGRAM_OFFSETS, NGRAM_SIZES
from raymoe.specs.layer_weights import TOKEN_EXPERTS, layer_prefix
from raymoe.specs.model import LayerSpec, ModelSpec, MoeSpec, SharedSpec
from raymoe.specs.weight_names import model_weights
from tests.kinds import covering
from tests.parity.combined_families import COMBINED_FAMILIES
from tests.parity.compressed_families import COMPRESSED_FAMILIES
from tests.parity.configurations import CONFIGURATIONS, Configuration, first_of_each_family
from tests.parity.dense_families import DENSE_FAMILIES
from tests.parity.driver import Driver, load_decoder
from tests.parity.hybrid_families import HYBRID_FAMILIES
from tests.parity.norm_families import NORM_FAMILIES
from tests.parity.oracle import make_checkpoint, make_config, make_model, make_prompts
from tests.parity.state_families import STATE_FAMILIES
from tests.parity.wrapper_families import WRAPPER_FAMILIES
from tests.reference import ReferenceModel

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ODD = [c for c in CONFIGURATIONS if any(word in c.name for word in ("bias", "clipped", "gelu"))]
HEAD_NORMS = [c for c in CONFIGURATIONS if c.name.startswith("cohere: norms")]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(1)  # matrices this small only wait for a second thread


def random_weights(spec: ModelSpec, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: (
            torch.rand(shape, generator=generator) + 0.5
            if "norm" in name or "scal" in name
            else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        ).to(dtype)
        for name, shape in model_weights(spec).items()
    }
    tables = [name for name in weights if name.endswith(TOKEN_EXPERTS)]
    weights |= {name: torch.arange(2).expand(spec.vocab_size, 2) for name in tables}
    for i, layer in enumerate(spec.layers):
        if (ngrams := layer.ngrams) is not None:
            weights |= {
                layer_prefix(i) + NGRAM_MULTIPLIERS: torch.tensor(ngrams.multipliers),
                layer_prefix(i) + NGRAM_SIZES: torch.tensor(ngrams.sizes),
                layer_prefix(i) + NGRAM_OFFSETS: torch.tensor(ngrams.offsets),
            }
    return weights


def load(spec: ModelSpec, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> Decoder:
    num_bytes = decoder_arena_bytes(spec, dtype, weights.__getitem__)
    arena = HostArena(num_bytes)
    decoder = Decoder.load(spec, weights.__getitem__, arena.allocate, dtype)
    assert arena.used_bytes == num_bytes
    return decoder


def run(decoder: Decoder, tokens: list[int]) -> torch.Tensor:
    return Driver(decoder, [tokens], 1).run_step([(0, len(tokens))])


def make_spec(family_fields: dict, **differences) -> ModelSpec:
    return ModelSpec.from_config(
        {
            "hidden_size": 48,
            "intermediate_size": 56,
            "num_hidden_layers": 2,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "vocab_size": 99,
        }
        | family_fields
        | differences
    )


# Kinds of layers and of weights; tokens of each family are compared with those of transformers.
OF_EACH_KIND = [
    c
    for c in first_of_each_family()
    if c.family
    in {
        *("mixtral", "gpt_oss", "deepseek_v3", "gemma4_text", "llama4_text", "dbrx"),
        *("cohere2_moe", "qwen3_next", "granitemoehybrid", "lfm2_moe", "kimi_linear"),
        *("glm5_next", "hy_v4"),
    }
] + [c for c in CONFIGURATIONS if c.name.startswith("cohere: norms")]

FEW_ODD = [*HEAD_NORMS, *ODD[::6], *(c for c in ODD if "clipped" in c.name)]


def of_reference(configurations: list[Configuration]) -> list[Configuration]:
    """Those whose layers the plain model has; others have a reference of their own."""
    others = {*COMPRESSED_FAMILIES, "qwen4_exp_text", "qwen4_exp"}
    return [c for c in configurations if c.family not in others]


def slow_unless_in(quick: list[Configuration], all_of_them: list[Configuration]) -> list:
    return [
        pytest.param(c, id=c.name, marks=() if c in quick else pytest.mark.slow)
        for c in all_of_them
    ]


@pytest.mark.parametrize(
    "configuration",
    slow_unless_in(
        [*OF_EACH_KIND, *FEW_ODD], of_reference([*first_of_each_family(), *ODD, *HEAD_NORMS])
    ),
)
def test_logits_are_those_of_the_reference(configuration, tmp_path) -> None:
    make_checkpoint(configuration, tmp_path)
    spec = ModelSpec.from_directory(tmp_path)
    tokens = make_prompts(configuration, 2)[1]
    reference = ReferenceModel(spec, WeightStore.open(spec, tmp_path), torch.float64)
    expected = reference.logits(tokens)
    got = run(load_decoder(tmp_path), tokens).double()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "configuration",
    slow_unless_in(
        [*OF_EACH_KIND, *HEAD_NORMS],
        of_reference(
            [*OF_EACH_KIND, *HEAD_NORMS, *(c for c in CONFIGURATIONS[::5] if c not in OF_EACH_KIND)]
        ),
    ),
)
def test_the_reference_agrees_with_transformers(configuration, tmp_path) -> None:
    model = make_checkpoint(configuration, tmp_path)
    spec = ModelSpec.from_directory(tmp_path)
    tokens = make_prompts(configuration, 4)[3]
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    reference = ReferenceModel(spec, WeightStore.open(spec, tmp_path), torch.float32)
    error = 1e-3 if spec.has_states else 1e-4  # transformers updates states for 64 tokens at once
    torch.testing.assert_close(
        reference.logits(tokens), expected, rtol=error, atol=error * float(expected.abs().max())
    )


@covering(dtype=DTYPES, stored=DTYPES, configuration=first_of_each_family())
def test_the_arena_holds_exactly_what_loading_asks_for(configuration, stored, dtype) -> None:
    config = make_model(configuration).config
    spec = ModelSpec.from_config(json.loads(config.to_json_string(use_diff=False)))
    spec = spec.with_table_dtype(str(stored).removeprefix("torch."))  # tables stay as stored
    load(spec, random_weights(spec, stored), dtype)


@pytest.mark.parametrize("configuration", slow_unless_in(FEW_ODD, [*ODD, *HEAD_NORMS]))
def test_the_arena_holds_odd_models_exactly(configuration) -> None:
    config = make_model(configuration).config
    spec = ModelSpec.from_config(json.loads(config.to_json_string(use_diff=False)))
    load(spec, random_weights(spec, torch.bfloat16), torch.bfloat16)


def test_nothing_is_copied_of_float32_experts_stored_as_float32() -> None:
    spec = make_spec({"model_type": "mixtral", "num_local_experts": 4})
    fused_qkv = 2 * 48 * (48 + 2 * 16) * 4
    assert decoder_arena_bytes(spec, torch.float32) == fused_qkv


def test_layers_are_released_one_by_one_as_they_are_built() -> None:
    spec = make_spec({"model_type": "mixtral", "num_local_experts": 2})
    weights, asked, released = random_weights(spec, torch.float32), [], []

    def get(name: str) -> torch.Tensor:
        asked.append(name)
        return weights[name]

    def release(names) -> None:
        released.append((len(asked), set(names)))

    arena = HostArena(decoder_arena_bytes(spec, torch.float32))
    Decoder.load(spec, get, arena.allocate, torch.float32, release=release)
    for count, names in released:
        assert names <= set(asked[:count])
    assert "model.layers.1.self_attn.q_proj.weight" not in asked[: released[0][0]]
    assert len(released) == 3


def relative_error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mixtral", "num_local_experts": 4},
        {"model_type": "qwen3", "head_dim": 16},
        {
            "model_type": "qwen2_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 64,
        },
        {
            "model_type": "mixtral",
            "num_local_experts": 4,
            "hidden_size": 512,
            "intermediate_size": 768,
            "num_attention_heads": 8,
            "head_dim": 64,
            "num_hidden_layers": 1,
        },
        {"model_type": "olmo3", "head_dim": 16, "sliding_window": 9},
        {"model_type": "flex_olmo", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2},
        {"model_type": "gemma3_text", "head_dim": 16, "sliding_window": 9},
        {
            "model_type": "gemma4_text",
            "head_dim": 16,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "sliding_window": 9,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "final_logit_softcapping": 20.0,
        },
    ],
    ids=lambda fields: f"{fields['model_type']} of {fields.get('hidden_size', 48)}",
)
def test_bfloat16_errs_at_most_twice_as_much_as_plain_torch(fields: dict) -> None:
    check_bfloat16(make_spec(fields))


# Wrapped models are those that they wrap.
OF_TODAY = {*DENSE_FAMILIES, *HYBRID_FAMILIES, *NORM_FAMILIES, "mistral4", "solar_open", "hy_v3"}
OF_TODAY |= {"granitemoeshared", "hy_v4", *STATE_FAMILIES, *COMBINED_FAMILIES}
FIRST_ONLY = WRAPPER_FAMILIES.keys() - {"hy_v4_vl"}  # hy_v4 shows it


@pytest.mark.slow
@pytest.mark.parametrize(
    "configuration",
    [c for c in CONFIGURATIONS if c.family in OF_TODAY]
    + [c for c in first_of_each_family() if c.family in FIRST_ONLY],
    ids=lambda c: c.name,
)
def test_bfloat16_of_families_whose_layers_differ_errs_as_little(configuration) -> None:
    config = make_config(configuration)
    spec = ModelSpec.from_config(json.loads(config.to_json_string(use_diff=False)))
    check_bfloat16(spec, num_seeds=24)  # enough that another choice of an expert does not decide


def check_bfloat16(spec: ModelSpec, num_seeds: int = 4) -> None:
    ours, plain = [], []
    for seed in range(num_seeds):
        weights = random_weights(spec, torch.bfloat16, seed)
        top = min(99, spec.vocab_size)
        tokens = torch.randint(top, (60,), generator=torch.Generator().manual_seed(seed)).tolist()
        exact, low = (
            ReferenceModel(spec, weights.__getitem__, dtype).logits(tokens)
            for dtype in (torch.float64, torch.bfloat16)
        )
        ours.append(relative_error(run(load(spec, weights, torch.bfloat16), tokens), exact))
        plain.append(relative_error(low, exact))
    assert sum(ours) <= 2 * sum(plain)
    assert sum(plain) < num_seeds / 5  # else nothing was shown


def test_float16_agrees_with_float64() -> None:
    spec = make_spec({"model_type": "llama", "head_dim": 16})
    weights = random_weights(spec, torch.float16)
    exact = ReferenceModel(spec, weights.__getitem__, torch.float64).logits([1, 2, 3, 4])
    assert relative_error(run(load(spec, weights, torch.float16), [1, 2, 3, 4]), exact) < 5e-3


def test_windows_of_one_token_see_only_themselves() -> None:
    spec = make_spec({"model_type": "mistral", "sliding_window": 1, "head_dim": 16})
    weights = random_weights(spec, torch.float32)
    decoder = load(spec, weights, torch.float32)
    together = run(decoder, [5, 6, 7])
    torch.testing.assert_close(together[2:], run(decoder, [5, 9, 7])[2:])
    reference = ReferenceModel(spec, weights.__getitem__, torch.float32)
    torch.testing.assert_close(together, reference.logits([5, 6, 7]), rtol=1e-4, atol=1e-4)


def test_shared_experts_without_gate_are_added_as_they_are() -> None:
    base = make_spec(
        {
            "model_type": "qwen3_moe",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
        }
    )
    layers = tuple(_with_shared(layer) for layer in base.layers)
    spec = replace(base, layers=layers)
    weights = random_weights(spec, torch.float32)
    assert "model.layers.0.mlp.shared_expert_gate.weight" not in weights
    expected = ReferenceModel(spec, weights.__getitem__, torch.float64).logits([3, 1, 4])
    got = run(load(spec, weights, torch.float32), [3, 1, 4]).double()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_layers_of_different_attention_agree_with_the_reference() -> None:
    base = make_spec({"model_type": "llama", "head_dim": 16})
    first, second = base.layers
    rope, attention = base.ropes[0], first.attention
    small = replace(
        attention,
        value_head_dim=8,
        value_scale=0.7,
        gate=OutputGate(activation="sigmoid", is_per_head=True),
    )
    wide = replace(
        attention,
        num_heads=2,
        num_kv_heads=1,
        value_head_dim=24,
        gate=OutputGate(activation="softplus", is_per_head=False),
        has_sinks=True,
    )
    layers = (
        replace(first, attention=small, rope=None),
        replace(second, attention=wide, rope=replace(rope, rotary_dim=8, theta=100.0)),
    )
    spec = replace(base, layers=layers)
    weights = random_weights(spec, torch.float32)
    expected = ReferenceModel(spec, weights.__getitem__, torch.float64).logits([3, 1, 4, 1, 5])
    got = run(load(spec, weights, torch.float32), [3, 1, 4, 1, 5]).double()
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_latent_attention_with_gates_agrees_with_the_reference() -> None:
    sizes = {"kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    base = make_spec(
        {"model_type": "deepseek_v3", "first_k_dense_replace": 2, "q_lora_rank": None} | sizes,
        num_key_value_heads=6,
    )
    gates = (
        OutputGate(activation="sigmoid", is_per_head=True),
        OutputGate(activation="softplus", is_per_head=False, has_bias=True),
    )
    layers = tuple(
        replace(layer, attention=replace(layer.attention, gate=gate))
        for layer, gate in zip(base.layers, gates, strict=True)
    )
    spec = replace(base, layers=layers)
    assert [layer.attention.gate_width for layer in spec.layers] == [6, 6 * 24]
    weights, tokens = random_weights(spec, torch.float32), [i % 90 for i in range(70)]
    expected = ReferenceModel(spec, weights.__getitem__, torch.float64).logits(tokens)
    decoder = load(spec, weights, torch.float32)
    driver = Driver(decoder, [tokens], 1)  # prompts in the plain form, then tokens in the other
    got = torch.cat([driver.run_step([(0, 68)]), driver.run_step([(68, 69)])]).double()
    torch.testing.assert_close(got, expected[:69], rtol=1e-4, atol=1e-4)


def test_only_the_wanted_rows_get_logits() -> None:
    spec = make_spec({"model_type": "llama", "head_dim": 16})
    decoder = load(spec, random_weights(spec, torch.float32), torch.float32)
    hidden_TH = decoder.embed(torch.tensor([1, 2, 3]))
    final_RH = decoder.final(hidden_TH, torch.tensor([2, 0]))
    assert torch.equal(final_RH[1], decoder.final(hidden_TH, torch.tensor([0]))[0])
    assert decoder.logits(final_RH).shape == (2, 99)


def _with_shared(layer: LayerSpec) -> LayerSpec:
    assert isinstance(layer.ffn, MoeSpec)
    return replace(layer, ffn=replace(layer.ffn, shared=SharedSpec(hidden=24, is_gated=False)))
