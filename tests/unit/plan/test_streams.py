"""A hidden state of several streams is wider on the link and in memory, and takes operations."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from raymoe.errors import ConfigError
from raymoe.memory.activations import ActivationSizes, DeviceActivations, HostActivations
from raymoe.model.decoder import cache_layouts
from raymoe.plan.cost import MicroBatchShape, StepCost
from raymoe.plan.footprint import device_footprint, host_footprint
from raymoe.plan.placement import Placement
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.work import ModelWork
from raymoe.schedule.graph import Op, Task
from raymoe.schedule.timeline import Resource
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.tensor_shards import shard_model

PUBLISHED = json.loads((Path(__file__).parents[2] / "data" / "published_models.json").read_text())
HIDDEN, STREAMS, FACTORS, TOKENS = 4096, 4, 24, 1024


@cache
def glm() -> ModelSpec:
    (found,) = (one for one in PUBLISHED if one["name"] == "zai-org/GLM-5.3-Flash")
    return ModelSpec.from_config(found["config"])


@cache
def in_one_stream() -> ModelSpec:
    return replace(glm(), layers=tuple(replace(one, streams=None) for one in glm().layers))


def test_each_layer_has_two_matrices_of_24_factors_with_a_base_and_3_scales() -> None:
    more = glm().num_parameters - in_one_stream().num_parameters
    assert more == 45 * 2 * (FACTORS * STREAMS * HIDDEN + FACTORS + 3)
    assert glm().residual_size == STREAMS * HIDDEN
    assert in_one_stream().residual_size == HIDDEN


def test_a_token_meets_the_matrix_of_attention_twice_and_that_of_the_network_once() -> None:
    work, plain = ModelWork.of(glm(), 2), ModelWork.of(in_one_stream(), 2)
    assert work.token_flop - plain.token_flop == 45 * 3 * 2 * FACTORS * STREAMS * HIDDEN
    assert work.layers[7].pre == plain.layers[7].pre
    more = work.all_weight_bytes - plain.all_weight_bytes
    assert more == 45 * 2 * 2 * FACTORS * STREAMS * HIDDEN


def seconds(model: ModelSpec, op: Op, layer: int, resource: Resource) -> float:
    shapes = (MicroBatchShape.decode(1000, 100),)
    cost = StepCost(ModelWork.of(model, 2), hardware_preset("l4"), shapes)
    return cost.duration_s(Task(op=op, layer=layer, part=0, resource=resource))


def test_embeddings_are_sent_as_wide_as_all_streams() -> None:
    node = hardware_preset("l4")
    wanted = 1000 * 2 * STREAMS * HIDDEN / node.htod_bytes_per_s
    assert seconds(glm(), Op.UP, 0, Resource.HTOD) == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize(
    ("op", "factors", "visits"), [(Op.PRE, 1, 2), (Op.POST, 2, 5), (Op.EXPERTS, 0, 2)]
)
def test_mixing_takes_bytes_of_all_streams_and_operations(op, factors, visits) -> None:
    node, layer = hardware_preset("l4"), 3  # with attention, whose result has no gate
    more = seconds(glm(), op, layer, Resource.GPU) - seconds(
        in_one_stream(), op, layer, Resource.GPU
    )
    moved = visits * 1000 * 2 * STREAMS * HIDDEN / node.gpu_bytes_per_s
    flop = factors * 2 * 1000 * FACTORS * STREAMS * HIDDEN
    assert more >= moved + flop / node.gpu_flop_per_s
    assert more <= moved + 10 * flop / node.gpu_flop_per_s + 1e-9


def sizes() -> ActivationSizes:
    return ActivationSizes(
        max_num_batched_tokens=TOKENS,
        micro_batch_tokens=TOKENS,
        ring=1,
        staged_micro_batches=0,
        staged_blocks=0,
    )


def allocated(model: ModelSpec) -> tuple[int, int]:
    """Bytes that the host's and the device's activations ask for."""
    asked: list[int] = []
    layouts = cache_layouts(model, torch.bfloat16)

    def allocate(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    HostActivations(model, sizes(), dtype=torch.bfloat16, allocate=allocate)
    host = sum(asked)
    DeviceActivations(model, sizes(), layouts, dtype=torch.bfloat16, allocate=allocate)
    return host, sum(asked) - host


def test_footprints_count_what_buffers_take_more() -> None:
    device = DevicePolicy(num_micro_batches=1, page_bytes=1 << 24)
    policy = Policy(
        max_num_seqs=64, max_num_batched_tokens=TOKENS, max_prefill_chunk_tokens=TOKENS,
        num_kv_blocks=64, device=device,
    )  # fmt: skip
    counted = []
    for model in (glm(), in_one_stream()):
        work = ModelWork.of(model, 2)
        placement = Placement.of(model, "cgopipe", policy, 2)
        footprints = host_footprint, device_footprint
        counted.append(
            [each(model, work, placement).bytes_of("activations") for each in footprints]
        )
    wide, plain = allocated(glm()), allocated(in_one_stream())
    assert wide[0] - plain[0] == counted[0][0] - counted[1][0] == TOKENS * 2 * 3 * HIDDEN
    factors = TOKENS * 4 * FACTORS
    assert wide[1] - plain[1] == counted[0][1] - counted[1][1] == TOKENS * 2 * 3 * HIDDEN + factors


def test_a_model_with_states_is_not_divided_between_ranks() -> None:
    with pytest.raises(ConfigError, match="keep states, which are not divided"):
        shard_model(glm(), 2)


def test_ranks_have_all_streams_of_a_model_that_is_divided() -> None:
    layers = tuple(one for one in glm().layers if not hasattr(one.attention, "kind"))
    part = shard_model(replace(glm(), layers=layers), 2)
    assert part.residual_size == glm().residual_size
    assert part.layers[0].attention.num_heads == 32
