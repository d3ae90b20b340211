"""Operations and bytes of layers: latent attention, stored formats, dense layers among experts."""

import itertools

import pytest
import torch

from raymoe.model.decoder import cache_layouts
from raymoe.plan.cost import StepCost
from raymoe.plan.placement import LayerBytes
from raymoe.plan.work import MicroBatchShape, ModelWork
from raymoe.schedule.graph import Op, Resource, Task
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.attention.latent import LatentAttentionSpec
from raymoe.specs.attention.recurrent import RecurrentSpec
from raymoe.specs.hardware import hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS, model_preset
from raymoe.specs.weights import Weight
from tests.unit.plan.device_jobs import placed_model

V3 = model_preset("deepseek-v3")
DELTA = model_preset("qwen3.5-35b-a3b")


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_layers_and_what_is_outside_of_them_make_the_model(name: str) -> None:
    model = model_preset(name)
    layers = sum(LayerBytes.of(model, i, 2).total for i in range(model.num_layers))
    outer = model.bytes_of(itertools.starmap(Weight, model.outer_weights().items()), 2)
    assert layers + outer == model.weight_bytes(2)
    assert placed_model(model, 2).streamed_bytes == layers


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_matrices_are_nearly_all_of_a_model(name: str) -> None:
    """All but vectors and the embedding, which is read by row."""
    model, work = model_preset(name), ModelWork.of(model_preset(name), 2)
    embedding = 2 * model.vocab_size * model.hidden_size
    assert work.all_weight_bytes == pytest.approx(model.weight_bytes(2) - embedding, rel=2e-3)
    assert work.all_weight_bytes <= model.weight_bytes(2) - embedding


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_token_takes_two_operations_for_each_weight_it_meets(name: str) -> None:
    model, work = model_preset(name), ModelWork.of(model_preset(name), 2)
    embedding = model.vocab_size * model.hidden_size
    met = 2 * (model.num_active_parameters - embedding)
    for spec in (layer.attention for layer in model.layers):
        if isinstance(spec, RecurrentSpec):  # decay, two products, update; the convolution
            met += 7 * spec.num_heads * spec.key_dim * spec.value_dim
            met += 2 * spec.conv_width * sum(spec.projections.values())
    assert work.token_flop + work.head_flop == pytest.approx(met, rel=1e-3)


def test_a_token_of_deepseek_caches_one_latent_and_is_bound_by_operations() -> None:
    """128 heads x (576 + 512) products, each an addition and a multiplication, over 1152 bytes."""
    layer = ModelWork.of(V3, 2).layers[5]
    assert layer.attention.kv_token_bytes == 1152
    assert layer.attention.pair_flop == 2 * 128 * (576 + 512)
    assert layer.attention.prompt_pair_flop == 2 * 128 * (192 + 128)
    assert layer.attention.pair_flop / layer.attention.kv_token_bytes == pytest.approx(242, abs=1)
    assert (layer.attention.query_width, layer.attention.output_width) == (128 * 576, 128 * 512)


def test_the_cache_takes_the_bytes_of_its_layouts() -> None:
    model = model_preset("gpt-oss-20b")
    for dtype in (torch.bfloat16, torch.int8):
        work = ModelWork.of(model, 2, kv_element_bytes=dtype.itemsize)
        for layer, layout in zip(
            work.layers, cache_layouts(model, dtype, torch.bfloat16), strict=True
        ):
            assert KV_BLOCK_TOKENS * layer.attention.kv_token_bytes == layout.block_bytes


def test_states_of_bfloat16_halve_what_a_sequence_keeps_besides_the_convolution() -> None:
    matrices = 30 * 32 * 128 * 128  # layers, heads, keys, values
    past = 30 * 3 * (2 * 16 + 32) * 128
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        model = DELTA.with_state_dtype(dtype)
        layouts = cache_layouts(model, torch.bfloat16)
        assert sum(layout.sequence_bytes for layout in layouts) == size * matrices + 2 * past
        assert ModelWork.of(model, 2).state_bytes == size * matrices + 2 * past
    assert V3.with_state_dtype("bfloat16") == V3


def test_absorbing_and_unfolding_are_as_many_products_as_the_latent_has() -> None:
    """Queries by keys' half of kv_b, results by values' half: the absorbed form, by einsum."""
    layer, attention = ModelWork.of(V3, 2).layers[5], V3.layers[5].attention
    assert isinstance(attention, LatentAttentionSpec)
    heads, rank = attention.num_heads, attention.kv_lora_rank
    absorb = heads * attention.nope_head_dim * rank
    up_project = heads * rank * attention.value_head_dim
    queries = 7168 * 1536 + 1536 * heads * 192
    assert layer.pre.parameters == queries + 7168 * 576 + absorb
    assert layer.post.parameters == up_project + heads * 128 * 7168
    q, up = torch.rand(heads, 4), torch.rand(heads, 4, 6)
    latent, rotated = torch.rand(9, 6), torch.rand(9)
    absorbed = torch.einsum("hd,hdr->hr", q, up) @ latent.T + rotated
    plain = torch.einsum("hd,hdr,sr->hs", q, up, latent) + rotated
    assert torch.allclose(absorbed, plain, atol=1e-5)


def test_keys_and_values_of_different_width_share_the_latent_by_their_width() -> None:
    """GLM-4.7-Flash: 192 dimensions of a key, 256 of a value."""
    layer = ModelWork.of(ModelSpec.from_config({"model_type": "glm4_moe_lite"}), 2).layers[0]
    assert layer.pre.parameters == 2048 * (768 + 576) + 768 * 20 * 256 + 20 * 192 * 512
    assert layer.post.parameters == 20 * 256 * 512 + 20 * 256 * 2048


def test_grouped_attention_takes_what_it_always_took() -> None:
    layer = ModelWork.of(model_preset("mixtral-8x7b"), 2).layers[0]
    assert layer.pre.parameters == 4096 * (4096 + 2 * 1024)
    assert layer.post.parameters == 4096 * 4096
    assert layer.attention.pair_flop == layer.attention.prompt_pair_flop == 4 * 4096
    assert (layer.attention.query_width, layer.attention.output_width) == (4096, 4096)
    assert layer.expert.num_bytes == 2 * 3 * 4096 * 14336


@pytest.mark.parametrize("i", [0, 5])
def test_dense_layers_have_no_experts(i: int) -> None:
    layer, size = ModelWork.of(V3, 2).layers[i], LayerBytes.of(V3, i, 2)
    is_dense = i < 3
    assert layer.num_experts == (0 if is_dense else 256)
    assert layer.common.parameters == 3 * 7168 * (18432 if is_dense else 2048)
    assert layer.router.parameters == (0 if is_dense else 256 * 7168)
    assert (size.num_experts, size.shared > 0) == (1 if is_dense else 256, not is_dense)


def test_stored_formats_decide_bytes_and_not_operations() -> None:
    config = dict(MODEL_PRESETS["gpt-oss-120b"])
    del config["quantization_config"]
    plain, stored = (
        ModelWork.of(model, 2).layers[0]
        for model in (ModelSpec.from_config(config), model_preset("gpt-oss-120b"))
    )
    assert plain.expert.parameters == stored.expert.parameters
    assert stored.expert.num_bytes == plain.expert.num_bytes * 17 // 64  # 4.25 bits of 16
    assert stored.pre == plain.pre  # only the experts are in four bits
    assert stored.router == plain.router


def test_a_cache_of_another_type_has_its_own_bytes() -> None:
    work = ModelWork.of(V3, 2, kv_element_bytes=1)
    assert work.kv_token_bytes == 70_272 // 2
    assert work.all_weight_bytes == ModelWork.of(V3, 2).all_weight_bytes


def test_a_tied_head_takes_the_bytes_of_the_embedding() -> None:
    tied = ModelSpec.from_config(MODEL_PRESETS["kimi-k2"] | {"tie_word_embeddings": True})
    assert ModelWork.of(tied, 2).head == ModelWork.of(model_preset("kimi-k2"), 2).head


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_every_model_has_costs_on_a_node_with_a_gpu(name: str) -> None:
    work = ModelWork.of(model_preset(name), 2)
    micro_batches = (MicroBatchShape.decode(8, 100), MicroBatchShape.prefill(1, 100))
    cost = StepCost(work, hardware_preset("l4"), micro_batches)
    for op in (Op.PRE, Op.POST, Op.EXPERTS):
        for part in (0, 1):
            task = Task(op=op, layer=1, part=part, resource=Resource.GPU)
            assert 0 < cost.duration_s(task) < 1


def test_results_of_latent_attention_travel_in_the_latent_space() -> None:
    node = hardware_preset("l4")
    cost = StepCost(ModelWork.of(V3, 2), node, (MicroBatchShape.decode(1000, 100),))
    down = Task(op=Op.QKV, layer=5, part=0, resource=Resource.DTOH)
    up = Task(op=Op.HID, layer=5, part=0, resource=Resource.HTOD)
    queries, results = 1000 * (2 * 128 * 576 + 1152), 1000 * 2 * 128 * 512
    assert cost.duration_s(down) == pytest.approx(queries / node.dtoh_bytes_per_s, rel=0.01)
    assert cost.duration_s(up) == pytest.approx(results / node.htod_bytes_per_s, rel=0.01)


def test_decays_and_gates_of_kimi_linear_come_from_latents() -> None:
    """Inputs q, k, v, f_a and b, then f_b; g_a and g_b belong to what follows the state."""
    layer = ModelWork.of(model_preset("kimi-linear-48b-a3b"), 2).layers[1]
    hidden, width, latent = 2304, 32 * 128, 128
    convolutions = 3 * width * 4
    inputs = 3 * width + latent + 32
    assert layer.pre.parameters == hidden * inputs + latent * width + convolutions
    assert layer.post.parameters == hidden * latent + latent * width + width * hidden
    assert layer.attention.state_bytes == 4 * 32 * 128 * 128 + 2 * 3 * 3 * width
    assert (
        layer.attention.query_width == 3 * width + width + 32
    )  # a decay for each dimension of a key


def test_what_the_host_needs_of_kimi_linear_travels_with_its_decays() -> None:
    work, node = ModelWork.of(model_preset("kimi-linear-48b-a3b"), 2), hardware_preset("l4")
    cost = StepCost(work, node, (MicroBatchShape.decode(1000, 100),))
    down = Task(op=Op.QKV, layer=1, part=0, resource=Resource.DTOH)
    num_bytes = 1000 * 2 * (4 * 32 * 128 + 32)
    assert cost.duration_s(down) == pytest.approx(num_bytes / node.dtoh_bytes_per_s, rel=0.01)


def test_experts_of_nemotron_super_read_and_write_a_latent() -> None:
    work = ModelWork.of(model_preset("nemotron-3-super-120b-a12b"), 2)
    layer = work.layers[0]
    assert (layer.num_experts, layer.top_k, layer.expert_input) == (512, 22, 1024)
    assert layer.expert.parameters == 2 * 1024 * 2688
    assert layer.common.parameters == 2 * 4096 * 5376 + 1024 * 4096
    mamba = 4096 * (128 * 64) * 2  # the gate and the output projection
    assert layer.post.parameters == mamba + 4096 * 1024


def test_rows_and_sums_of_latent_experts_are_as_narrow_as_the_latent() -> None:
    work, node = ModelWork.of(model_preset("nemotron-3-super-120b-a12b"), 2), hardware_preset("l4")
    cost = StepCost(work, node, (MicroBatchShape.decode(10_000, 100),))
    rows = Task(op=Op.ROWS, layer=0, part=0, resource=Resource.DTOH)
    sums = Task(op=Op.SUMS, layer=0, part=0, resource=Resource.HTOD)
    sent, returned = 10_000 * (2 * 1024 + 22 * 8), 10_000 * 4 * 1024
    assert cost.duration_s(rows) == pytest.approx(sent / node.dtoh_bytes_per_s, rel=0.01)
    assert cost.duration_s(sums) == pytest.approx(returned / node.htod_bytes_per_s, rel=0.01)
