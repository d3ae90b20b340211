"""What a rank loads is a slice of what is stored, bit by bit; what ranks add up is the model."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
from torch import Tensor

from raymoe.codecs import StoredMatrix, as_tensor
from raymoe.errors import ConfigError
from raymoe.memory.arena import HostArena
from raymoe.memory.weights import ShardedWeights, WeightStore
from raymoe.model.decoder import Decoder
from raymoe.model.loading import Reduce, decoder_arena_bytes
from raymoe.specs.attention.grouped import AttentionSpec
from raymoe.specs.model import ModelSpec
from raymoe.specs.tensor_shards import cut_of, shard_model
from raymoe.specs.weight_names import model_weights
from tests.parity.cases import get_case
from tests.parity.configurations import CONFIGURATIONS, first_of_each_family
from tests.parity.driver import Driver, load_decoder
from tests.quantised_checkpoints import checkpoints

# Grouped queries; norms over all heads; a gated shared expert, biases; sinks, biases of all sums;
# latents, dense layers.
FIRST = [
    configuration.name
    for configuration in first_of_each_family()
    if configuration.family in {"mixtral", "olmoe", "qwen2_moe", "gpt_oss", "deepseek_v3"}
]
# Those of the tiny models whose groups allow it.
QUANTISED = ("fp8 channels", "packed int4, experts alone")


def open_parts(directory: Path, count: int) -> tuple[ModelSpec, WeightStore, list[ShardedWeights]]:
    model = ModelSpec.from_directory(directory)
    store = WeightStore.open(model, directory)
    part = shard_model(model, count)
    return model, store, [ShardedWeights(store, model, part, rank) for rank in range(count)]


def test_heads_are_those_that_the_kernels_would_see() -> None:
    model, store, parts = open_parts(get_case("mixtral: plain").directory, 2)
    attention = model.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim

    def of(weights: WeightStore | ShardedWeights, name: str) -> Tensor:
        found = weights(f"model.layers.0.{name}.weight")
        assert isinstance(found, Tensor)
        return found

    for rank, part in enumerate(parts):
        for name, number in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            whole_HDI = of(store, f"self_attn.{name}").unflatten(0, (number, dim))
            own = slice(rank * number // 2, (rank + 1) * number // 2)
            assert torch.equal(of(part, f"self_attn.{name}"), whole_HDI[own].flatten(0, 1))
        whole_OHD = of(store, "self_attn.o_proj").unflatten(1, (heads, dim))
        own = slice(rank * heads // 2, (rank + 1) * heads // 2)
        assert torch.equal(of(part, "self_attn.o_proj"), whole_OHD[:, own].flatten(1))
        for expert in range(4):
            for name, axis in (("gate", 0), ("up", 0), ("down", 1)):
                whole = of(store, f"mlp.experts.{expert}.{name}_proj")
                found = of(part, f"mlp.experts.{expert}.{name}_proj")
                assert torch.equal(found, whole.chunk(2, axis)[rank])
        assert torch.equal(of(part, "mlp.gate"), of(store, "mlp.gate"))


def check_slices(directory: Path, count: int) -> int:
    """Compare every weight with a slice of the whole; the number of quantised ones."""
    model, store, parts = open_parts(directory, count)
    shapes = model_weights(shard_model(model, count))
    num_quantised = 0
    for name, whole in model_weights(model).items():
        stored = store(name)
        for rank, part in enumerate(parts):
            cut = cut_of(name, whole, shapes[name], rank=rank, count=count)
            found = part(name)
            assert tuple(found.shape) == shapes[name]
            assert isinstance(found, StoredMatrix) == isinstance(stored, StoredMatrix)
            num_quantised += isinstance(found, StoredMatrix)
            expected = as_tensor(stored, torch.float32)
            if cut.axis is not None:
                expected = expected.narrow(cut.axis, cut.begin, cut.end - cut.begin)
            if cut.is_zero:
                expected = torch.zeros_like(expected)
            assert torch.equal(as_tensor(found, torch.float32), expected)
    return num_quantised


@pytest.mark.parametrize("name", FIRST)
def test_parts_are_slices_of_what_is_stored(name: str) -> None:
    assert check_slices(get_case(name).directory, 2) == 0


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_parts_stand_for_slices_of_the_same_numbers(name: str) -> None:
    assert check_slices(checkpoints(name).quantised, 2) > 0


def test_columns_in_an_order_of_their_own_are_refused() -> None:
    _, _, parts = open_parts(checkpoints("packed int4, zero points, order").quantised, 2)
    with pytest.raises(ConfigError, match=r"o_proj.weight is stored as int4_packed .*act-order"):
        parts[0]("model.layers.0.self_attn.o_proj.weight")


class Ranks:
    """Ranks in threads, which add up their parts where they meet."""

    def __init__(self, count: int) -> None:
        self._parts: list[Tensor | None] = [None] * count
        self._barrier = Barrier(count)

    def reduce_of(self, rank: int) -> Reduce:
        def reduce(delta_TH: Tensor) -> Tensor:
            self._parts[rank] = delta_TH
            self._barrier.wait()
            total_TH = torch.stack([part for part in self._parts if part is not None]).sum(0)
            self._barrier.wait()
            return total_TH

        return reduce


def load_part(weights: ShardedWeights, part: ModelSpec, reduce: Reduce) -> Decoder:
    num_bytes = decoder_arena_bytes(part, torch.float32, weights)
    arena = HostArena(num_bytes)
    decoder = Decoder.load(part, weights, arena.allocate, torch.float32, reduce=reduce)
    assert arena.used_bytes == num_bytes
    return decoder


def divided_logits(directory: Path, prompts: list[list[int]], count: int) -> list[Tensor]:
    """Logits of each rank."""
    model, _, parts = open_parts(directory, count)
    ranks, part = Ranks(count), shard_model(model, count)

    def run(rank: int) -> Tensor:
        driver = Driver(load_part(parts[rank], part, ranks.reduce_of(rank)), prompts, 1)
        return driver.run_step([(0, len(prompt)) for prompt in prompts])

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def logits(directory: Path, prompts: list[list[int]]) -> Tensor:
    driver = Driver(load_decoder(directory), prompts, 1)
    return driver.run_step([(0, len(prompt)) for prompt in prompts])


@pytest.mark.parametrize("name", FIRST)
def test_what_two_ranks_add_up_is_the_model(name: str) -> None:
    case = get_case(name)
    prompts = case.reference.prompts[:4]
    expected_TV = logits(case.directory, prompts)
    first_TV, second_TV = divided_logits(case.directory, prompts, 2)
    assert torch.equal(first_TV, second_TV)  # ranks stay the same bit by bit
    torch.testing.assert_close(first_TV, expected_TV, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 6])
@pytest.mark.parametrize("name", [configuration.name for configuration in CONFIGURATIONS])
def test_every_configuration_that_can_be_divided(name: str, count: int) -> None:
    case = get_case(name)
    prompts = case.reference.prompts[:4]
    try:
        found = divided_logits(case.directory, prompts, count)
    except ConfigError as error:
        assert "tensor_parallel_size" in str(error)  # noqa: PT017 - most are divided
        return
    expected_TV = logits(case.directory, prompts)
    for each_TV in found:
        assert torch.equal(each_TV, found[0])
        torch.testing.assert_close(each_TV, expected_TV, rtol=1e-4, atol=1e-4)
