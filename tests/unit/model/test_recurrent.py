"""Decays of layers with states: their formulas, and a layer against the reference."""

import dataclasses

import pytest
import torch
from torch import Tensor
from transformers.models.bailing_hybrid import modeling_bailing_hybrid
from transformers.models.glm5_next import modeling_glm5_next

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.memory.arena import HostArena
from raymoe.model.loading import Loader
from raymoe.model.recurrent import load_recurrent, log_decays, state_layout
from raymoe.specs.attention.recurrent import RECURRENT, RecurrentSpec
from raymoe.specs.layer_weights import attention_weights
from raymoe.specs.layers import DenseSpec, LayerSpec
from tests.reference import ReferenceModel

BOUND = -5.0
SPEC = RecurrentSpec(
    kind="kimi_delta",
    num_key_heads=3,
    num_heads=3,
    key_dim=16,
    value_dim=16,
    conv_width=4,
    norm_eps=1e-6,
    decay_bound=BOUND,
)


def random_weights(spec: RecurrentSpec, hidden_size: int) -> dict[str, Tensor]:
    layer = LayerSpec(attention=spec, ffn=DenseSpec(hidden=0, activation="silu"), rope=None)
    generator = torch.Generator().manual_seed(0)
    return {
        name.removeprefix(RECURRENT): torch.randn(shape, generator=generator) * shape[-1] ** -0.25
        for name, shape, *_ in attention_weights(layer, hidden_size)
        if name.startswith(RECURRENT)
    }


def forget_gate(source: object, name: str) -> torch.nn.Module:
    config = {"hidden_size": 24, "linear_num_heads": 3, "linear_head_dim": 16, "head_dim": 16}
    config |= {"kda_safe_gate": True, "kda_lower_bound": BOUND, "linear_lower_bound": BOUND}
    return getattr(source, name)(type("Config", (), config))


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (modeling_bailing_hybrid, "BailingHybridForgetGate"),
        (modeling_glm5_next, "Glm5NextTextForgetGate"),
    ],
    ids=["bailing_hybrid", "glm5_next"],
)
@torch.no_grad()
def test_bounded_decays_are_those_of_transformers(source: object, name: str) -> None:
    theirs = forget_gate(source, name)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    inputs_TH = torch.randn(50, 24)
    want_THX = theirs(inputs_TH[None])[0]
    projected_TA = inputs_TH
    for linear in (each for each in theirs.modules() if isinstance(each, torch.nn.Linear)):
        projected_TA = linear(projected_TA)
    biased_THX = (projected_TA + theirs.dt_bias).unflatten(1, (3, -1))
    got_THX = log_decays(biased_THX, SPEC, -theirs.A_log.exp())
    torch.testing.assert_close(got_THX, want_THX, rtol=1e-6, atol=1e-6)
    assert BOUND <= got_THX.min() < 0.9 * BOUND < 0.1 * BOUND < got_THX.max() <= 0


@pytest.mark.parametrize("latent_width", [None, 8])
@pytest.mark.parametrize("bound", [None, -5.0, -0.5])
@pytest.mark.parametrize("is_staged", [False, True], ids=["host", "device"])
@torch.no_grad()
def test_a_layer_with_bounded_decays_is_that_of_the_reference(
    bound: float | None, latent_width: int | None, *, is_staged: bool
) -> None:
    spec = dataclasses.replace(SPEC, decay_bound=bound, latent_width=latent_width)
    weights, hidden_TH = random_weights(spec, 24), torch.randn(60, 24)
    loader = Loader(
        lambda name: weights[name.removeprefix("x.")], HostArena(1 << 20).allocate, torch.float32
    )
    ours = load_recurrent(spec, loader, "x.")
    reference = ReferenceModel(None, weights.__getitem__, torch.float64)  # type: ignore[arg-type]
    want_TH = reference._recurrent(hidden_TH.double(), spec, "")
    cache = torch.empty(state_layout(spec, torch.float32).sequence_bytes, dtype=torch.uint8)
    got, context = [], 0
    for count in (1, 40, 19):  # in three steps
        step_TH = hidden_TH[context : context + count]
        context += count
        batch = AttentionBatch(
            query_start=torch.tensor([0, count], dtype=torch.int32),
            context_tokens=torch.tensor([context], dtype=torch.int32),
            block_table=torch.empty(1, 0, dtype=torch.int32),
            slots=torch.tensor([0], dtype=torch.int32),
        )
        projected = ours.project(step_TH, None)  # type: ignore[arg-type]
        if is_staged:
            staged = ours.staged_batch(batch, torch.device("cpu"))
            read_TX = ours.attend_staged(projected, cache, staged)
        else:
            read_TX = ours.attend(projected, cache, batch)
        got.append(ours.output(read_TX, step_TH))
    torch.testing.assert_close(torch.cat(got).double(), want_TH, rtol=1e-4, atol=1e-4)
