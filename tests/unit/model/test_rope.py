import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from raymoe.errors import ConfigError
from raymoe.model.rope import Rotary, dynamic_frequencies, inverse_frequencies
from raymoe.specs.rope import RopeRule, RopeSpec, parse_rope
from tests.parity.fields import DYNAMIC, LINEAR, LLAMA3, YARN, longrope

HEAD_DIM, MAX_POSITIONS = 32, 48
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": LINEAR,
    "dynamic": DYNAMIC,
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn, no room for a ramp": YARN | {"beta_fast": 2.0, "beta_slow": 2.0, "truncate": False},
    "yarn, not truncated": YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, attention factor": YARN | {"attention_factor": 0.9},
    "longrope": longrope(HEAD_DIM),
    "longrope without factor": {k: v for k, v in longrope(HEAD_DIM).items() if k != "factor"},
    "longrope, attention factor": longrope(HEAD_DIM) | {"attention_factor": 1.2},
}


def make_config(scaling: dict, theta: float = 10_000.0) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": theta, **scaling},
    )


def make_spec(scaling: dict, theta: float = 10_000.0) -> RopeSpec:
    return parse_rope(
        {"rope_parameters": {"rope_theta": theta, **scaling}},
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        rule=RopeRule(is_partial=True),
    )


def oracle(config: LlamaConfig, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of a forward pass of these positions by a fresh model of transformers."""
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.empty(1), torch.tensor([list(positions)]))
    return cos[0, :, : HEAD_DIM // 2], sin[0, :, : HEAD_DIM // 2]


def tables(spec: RopeSpec, positions: list[int], prompt_tokens: list[int]) -> torch.Tensor:
    rotary = Rotary(spec)
    rotary.reserve(max(positions, default=0) + 1)
    rows_T, cos_PR, sin_PR = rotary.angles(
        torch.tensor(positions, dtype=torch.int32), torch.tensor(prompt_tokens, dtype=torch.int32)
    )
    return torch.stack([cos_PR[rows_T.long()], sin_PR[rows_T.long()]])


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_angles_of_a_short_prompt_are_those_of_transformers(name: str, theta: float) -> None:
    prompt = range(37)
    got = tables(make_spec(SCALINGS[name], theta), list(prompt), [37] * 37)
    expected = torch.stack(oracle(make_config(SCALINGS[name], theta), prompt))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", SCALINGS)
def test_angles_of_a_long_prompt_are_those_of_transformers(name: str) -> None:
    prompt = range(90)
    got = tables(make_spec(SCALINGS[name]), list(prompt), [90] * 90)
    torch.testing.assert_close(
        got, torch.stack(oracle(make_config(SCALINGS[name]), prompt)), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_generated_tokens_are_rotated_for_the_length_at_their_own_pass(name: str) -> None:
    config, spec = make_config(SCALINGS[name]), make_spec(SCALINGS[name])
    rotary = LlamaRotaryEmbedding(config)
    for position in range(30, 60):
        cos, _ = rotary(torch.empty(1), torch.tensor([[position]]))
        got_cos, _ = tables(spec, [position], [31])
        torch.testing.assert_close(got_cos[0], cos[0, 0, : HEAD_DIM // 2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_angles_do_not_depend_on_chunks_or_neighbours(name: str) -> None:
    spec = make_spec(SCALINGS[name])
    whole = tables(spec, list(range(60)), [60] * 60)
    chunk = tables(spec, [20, 21, 5, 70], [60, 60, 7, 7])
    assert torch.equal(chunk[:, :2], whole[:, 20:22])
    assert torch.equal(chunk[:, 2], tables(spec, [5], [7])[:, 0])
    assert torch.equal(chunk[:, 3], tables(spec, [70], [7])[:, 0])


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_length_dependent_ropes_ask_for_the_prompt_length(name: str) -> None:
    with pytest.raises(ConfigError, match="prompt length"):
        Rotary(make_spec(SCALINGS[name])).angles(torch.tensor([1], dtype=torch.int32))


@pytest.mark.parametrize("partial", [0.25, 0.5])
@pytest.mark.parametrize("name", ["linear", "llama3", "yarn", "dynamic"])
def test_partial_frequencies_are_those_of_transformers(name: str, partial: float) -> None:
    scaling = SCALINGS[name] | {"partial_rotary_factor": partial}
    expected, _ = ROPE_INIT_FUNCTIONS[name](make_config(scaling))
    spec = make_spec(scaling)
    got = inverse_frequencies(spec)[0]
    if name == "dynamic":
        got = dynamic_frequencies(spec, torch.tensor([1]))[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)
    assert spec.rotary_dim == int(HEAD_DIM * partial)


def test_tables_grow_with_the_positions_and_keep_their_values() -> None:
    rotary = Rotary(make_spec({}))
    rotary.reserve(6)
    first = rotary.angles(torch.tensor([5], dtype=torch.int32))
    rotary.reserve(9001)
    later = rotary.angles(torch.tensor([5, 9000], dtype=torch.int32))
    assert len(later.cos_PR) > 9000 >= len(first.cos_PR)
    assert torch.equal(later.cos_PR[5], first.cos_PR[5])
    assert rotary.angles(torch.empty(0, dtype=torch.int32)).rows_T.numel() == 0
