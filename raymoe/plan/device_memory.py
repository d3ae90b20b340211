"""Bytes that a policy takes on the device and on the host: what the engine will allocate.

T tokens of a pass, W tokens of a wave, H hidden, K experts per token.
"""

from raymoe.plan.device_pass import KV_BLOCK_TOKENS, StreamedPasses
from raymoe.plan.pages import PageCut, layer_sizes
from raymoe.plan.policy import Footprint, Policy
from raymoe.plan.work import LayerWork, ModelWork
from raymoe.specs.model import ModelSpec
from raymoe.units import GIB, MIB

RUNTIME_BYTES = GIB  # interpreter, torch, tokenizer, request state
DEVICE_RUNTIME_BYTES = 512 * MIB  # kernels, workspaces of matrix products, rounding
DECODING_BYTES = 160 * MIB  # a block of a quantised matrix on its way to numbers
LOGIT_CHUNK_ROWS = 256
NUM_SLOTS = 2
STAGED_WAVES = 2  # KV of this many waves is on the device at once
FLOAT_BYTES = 4
UNEVENNESS = 4  # rows of the busiest expert over the mean


def device_footprint(model: ModelSpec, work: ModelWork, passes: StreamedPasses) -> Footprint:
    """Device memory of a policy.

    Args:
        model: The model.
        work: The same in numbers.
        passes: Schedule and sizes.
    """
    tokens = passes.policy.pass_tokens
    ring = passes.ring * _around_attention(model, work, passes.wave_tokens)
    at_experts = min(passes.waves_per_group * passes.wave_tokens, tokens)
    return Footprint(
        memory="device memory",
        parts=(
            ("weights that stay", passes.cut.resident_bytes),
            ("weight slots", weight_slots_bytes(passes.cut)),
            ("final norm and head", _head_bytes(model, work)),
            ("activations", _routed(work, tokens) + ring),
            ("staged KV", STAGED_WAVES * passes.staged_blocks * _layer_block_bytes(work)),
            ("intermediates", _intermediates(model, work, at_experts)),
        ),
    )


def host_footprint(model: ModelSpec, work: ModelWork, passes: StreamedPasses) -> Footprint:
    """Host memory of a policy; arguments as in `device_footprint`."""
    element, hidden = work.bytes_per_element, work.hidden_size
    policy = passes.policy
    ring = passes.ring * _around_attention(model, work, passes.wave_tokens)
    staging = passes.device.staging_slots * passes.cut.page_length
    return Footprint(
        memory="host memory",
        parts=(
            ("weights", passes.cut.streamed_bytes + model.vocab_size * hidden * element),
            ("KV cache", policy.num_kv_blocks * kv_block_bytes(work)),
            ("activations", policy.pass_tokens * hidden * element + ring + staging),
            ("runtime", RUNTIME_BYTES + logit_bytes(model)),
        ),
    )


def resident_footprint(model: ModelSpec, work: ModelWork, policy: Policy) -> Footprint:
    """Device memory of a policy with all weights and the KV cache on the device."""
    element, hidden, tokens = work.bytes_per_element, work.hidden_size, policy.pass_tokens
    embedding = model.vocab_size * hidden * element
    routed = _routed(work, tokens) + _around_attention(model, work, tokens)
    return Footprint(
        memory="device memory",
        parts=(
            ("weights", sum(layer.total for layer in layer_sizes(model, element))),
            ("embedding, final norm and head", embedding + _head_bytes(model, work)),
            ("KV cache", policy.num_kv_blocks * kv_block_bytes(work)),
            ("activations", routed),
            ("intermediates", _intermediates(model, work, tokens)),
        ),
    )


def _head_bytes(model: ModelSpec, work: ModelWork) -> int:
    """Final norm and head, with the biases they may have."""
    vectors = sum(shape[0] for shape in model.outer_weights().values() if len(shape) == 1)
    return work.head.num_bytes + vectors * work.bytes_per_element


def resident_host_footprint(model: ModelSpec) -> Footprint:
    """Host memory of a model that lies on the device."""
    return Footprint(memory="host memory", parts=(("runtime", RUNTIME_BYTES + logit_bytes(model)),))


def workspace_bytes(footprint: Footprint) -> int:
    """Of the intermediates of a device, what operations allocate through torch."""
    return footprint.bytes_of("intermediates") - DEVICE_RUNTIME_BYTES


def weight_slots_bytes(cut: PageCut) -> int:
    """Room for what streams of two layers."""
    return NUM_SLOTS * cut.largest_layer_bytes


def kv_block_bytes(work: ModelWork) -> int:
    """One block of the KV cache, all layers."""
    return KV_BLOCK_TOKENS * work.kv_token_bytes


def logit_bytes(model: ModelSpec) -> int:
    """A chunk of logits, its float copy and what sampling makes of it."""
    return 3 * FLOAT_BYTES * LOGIT_CHUNK_ROWS * model.vocab_size


def _around_attention(model: ModelSpec, work: ModelWork, wave_tokens: int) -> int:
    """Queries, keys, values and results of a wave, [W, ...]."""
    width = model.layers[0].attention.token_shapes.num_elements
    return wave_tokens * width * work.bytes_per_element


def _layer_block_bytes(work: ModelWork) -> int:
    return KV_BLOCK_TOKENS * max(layer.kv_token_bytes for layer in work.kinds)


def _routed(work: ModelWork, tokens: int) -> int:
    """Hidden states of all tokens, twice, and the choices of the router."""
    top_k = max(layer.top_k for layer in work.kinds)
    return tokens * (2 * work.hidden_size * work.bytes_per_element + top_k * 2 * FLOAT_BYTES)


def _intermediates(model: ModelSpec, work: ModelWork, tokens: int) -> int:
    """The largest of what operations allocate while they run: projections, or routed experts."""
    largest = max(_ffn_intermediates(layer, work, tokens) for layer in work.kinds)
    decoding = 0 if model.quantization is None else DECODING_BYTES
    return largest + decoding + logit_bytes(model) + DEVICE_RUNTIME_BYTES


def _ffn_intermediates(layer: LayerWork, work: ModelWork, tokens: int) -> int:
    """What a layer's network takes: torch's experts one by one, or ours in tiles, or a dense one.

    Torch's: results of all routed rows, weighted in float32, and three matrices of one expert's
    rows. Ours: gated products and float32 results of all rows, and a copy of the inputs.
    """
    element, hidden = work.bytes_per_element, work.hidden_size
    rows, wide = tokens * layer.top_k, layer.expert.parameters // (3 * hidden)
    busiest = min(tokens, UNEVENNESS * rows // max(layer.num_experts, 1))
    one_by_one = rows * hidden * (element + FLOAT_BYTES) + 3 * busiest * wide * element
    in_tiles = rows * (wide * element + hidden * FLOAT_BYTES) + tokens * hidden * element
    dense = 3 * tokens * (layer.common.parameters // (3 * hidden)) * element
    return max(one_by_one, in_tiles, dense)
