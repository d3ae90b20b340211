"""Needs of host and device memory of a placement, by purpose."""

from raymoe.plan.cost import ROUTING_BYTES, SUM_BYTES
from raymoe.plan.placement import Placement
from raymoe.plan.policy import Footprint, Policy
from raymoe.plan.work import LayerWork, ModelWork
from raymoe.schedule.program import NUM_RETURNED_SUMS
from raymoe.specs.attention.kind import KV_BLOCK_TOKENS
from raymoe.specs.layers import rows_at_once
from raymoe.specs.model import ModelSpec, MoeSpec
from raymoe.units import GIB, MIB

RUNTIME_BYTES = GIB  # interpreter, torch, tokenizer, request state
DEVICE_RUNTIME_BYTES = 512 * MIB  # kernels, workspaces of matrix products, rounding
DECODING_BYTES = (
    160 * MIB
)  # a block of a quantised matrix while it is dequantised, or of the head in float32
SELECTION_BYTES = 320 * MIB  # scores of an indexer, absorbed queries and their results
SCAN_BYTES = 256 * MIB  # matrices of the chunks of a prompt that are multiplied at once
LOGIT_CHUNK_ROWS = 256
STAGED_MICRO_BATCHES = 2  # micro-batches whose KV is on the device at once
FLOAT_BYTES = 4
UNEVENNESS = 4  # max over mean rows per expert


def device_footprint(model: ModelSpec, work: ModelWork, placement: Placement) -> Footprint:
    """What one rank needs of its device; nothing if the host has and computes everything."""
    if placement.is_in_place:
        return Footprint(memory="device memory", parts=())
    policy, is_resident = placement.policy, placement.is_resident
    tokens = policy.max_num_batched_tokens
    ring = placement.ring * placement.micro_batch_tokens * work.around_attention_bytes
    rows = tokens if placement.has_sums else 0
    if placement.has_host_experts:
        rows += NUM_RETURNED_SUMS * placement.launch_tokens
    sums = rows * work.expert_input * SUM_BYTES
    groups = 1 if placement.is_resident else placement.device.expert_groups
    intermediates = _intermediates(model, work, placement.launch_tokens, groups)
    if placement.states_on_device or (work.stages_states and placement.staged_blocks):
        intermediates += _state_intermediates(work, placement.micro_batch_tokens)
    intermediates += _selection_intermediates(work, tokens)
    intermediates += placement.micro_batch_tokens * _mixed_bytes(work)
    head = _head_bytes(model, work)
    staged = STAGED_MICRO_BATCHES * placement.staged_blocks * _layer_block_bytes(work)
    if work.stages_states:
        state_bytes = max(layer.attention.state_bytes for layer in work.kinds)
        staged += STAGED_MICRO_BATCHES * placement.staged_rows * state_bytes
    activations = _routed(work, tokens) + ring + sums
    if is_resident:
        head += _embedding_bytes(model, work)
        parts = {
            "weights": placement.resident_bytes,
            "embedding, final norm and head": head,
            "KV cache": cache_bytes(work, policy),
            "activations": activations,
        }
    else:
        parts = {
            "weights that stay": placement.resident_bytes,
            "weight slots": placement.slots_bytes,
            "final norm and head": head,
            "activations": activations,
            "staged KV": staged,
            "states": placement.states_on_device * policy.num_state_slots * work.state_bytes,
        }
    parts["intermediates"] = intermediates
    return Footprint(memory="device memory", parts=tuple(parts.items()))


def host_footprint(
    model: ModelSpec, work: ModelWork, placement: Placement, weight_bytes: int = 0
) -> Footprint:
    """What one rank needs of the host.

    Args:
        weight_bytes: All weights in the form that the cores' kernels read, where they compute all.
    """
    runtime, logits = RUNTIME_BYTES, logit_bytes(model)
    tables = (("tables of n-grams", model.table_bytes),) if model.table_bytes else ()
    if placement.is_resident:
        return Footprint(memory="host memory", parts=(*tables, ("runtime", runtime + logits)))
    policy = placement.policy
    num_cache_bytes = cache_bytes(work, policy)
    if placement.is_in_place:
        activations = policy.max_num_batched_tokens * _host_token_bytes(model, work) + logits
    else:
        weight_bytes = placement.streamed_bytes + _embedding_bytes(model, work)
        runtime += logits
        if placement.states_on_device:
            num_cache_bytes -= policy.num_state_slots * work.state_bytes
        activations = _host_activations(work, placement)
    return Footprint(
        memory="host memory",
        parts=(
            ("weights", weight_bytes),
            *tables,
            ("KV cache", num_cache_bytes),
            ("activations", activations),
            ("runtime", runtime),
        ),
    )


def _host_activations(work: ModelWork, placement: Placement) -> int:
    """Bytes of the host's buffers of a step that goes to a device and back."""
    element = work.bytes_per_element
    of_token = (work.residual_size + 2 * work.ngram_width) * element  # read, then sent
    if placement.has_host_experts:  # their input, routing and sums
        top_k = max(layer.top_k for layer in work.kinds)
        of_token += work.expert_input * (element + SUM_BYTES) + top_k * ROUTING_BYTES
    ring = placement.ring * placement.micro_batch_tokens * work.around_attention_bytes
    staging = placement.device.staging_slots * placement.page_length
    return placement.policy.max_num_batched_tokens * of_token + ring + staging


def _host_token_bytes(model: ModelSpec, work: ModelWork) -> int:
    """Bytes of a token's activations where the cores compute everything."""
    hidden, widest = model.hidden_size, 0
    for layer in model.layers:
        attention, ffn = layer.attention, layer.ffn
        width = attention.working_width
        if isinstance(ffn, MoeSpec):
            width += ffn.top_k * (ffn.expert_hidden + ffn.input_size(hidden))
        else:
            width += 2 * ffn.hidden
        widest = max(widest, width)
    width = widest + 4 * hidden + work.residual_size + work.ngram_width
    return work.bytes_per_element * width + _mixed_bytes(work)


def _embedding_bytes(model: ModelSpec, work: ModelWork) -> int:
    return model.vocab_size * work.hidden_size * work.bytes_per_element


def _head_bytes(model: ModelSpec, work: ModelWork) -> int:
    vectors = sum(shape[0] for shape in model.outer_weights().values() if len(shape) == 1)
    return work.head.num_bytes + vectors * work.bytes_per_element


def workspace_bytes(footprint: Footprint) -> int:
    """The part of the intermediates that operations allocate through torch."""
    return footprint.bytes_of("intermediates") - DEVICE_RUNTIME_BYTES


def kv_block_bytes(work: ModelWork) -> int:
    """Bytes of a block in all layers."""
    return KV_BLOCK_TOKENS * work.kv_token_bytes


def window_block_bytes(work: ModelWork) -> int:
    """Bytes of a block in layers that keep no more than a window."""
    return KV_BLOCK_TOKENS * work.windowed_token_bytes


def cache_bytes(work: ModelWork, policy: Policy) -> int:
    """Bytes of the KV cache, of the states of all sequences and of their snapshots."""
    num_blocks, num_bytes = policy.num_kv_blocks, policy.num_state_slots * work.state_bytes
    if num_windowed := policy.num_window_blocks(work.window):
        num_bytes -= (num_blocks - num_windowed) * window_block_bytes(work)
    return num_bytes + num_blocks * kv_block_bytes(work)


def logit_bytes(model: ModelSpec) -> int:
    """A chunk of logits, its float32 copy and the sampler's buffers."""
    return 3 * FLOAT_BYTES * LOGIT_CHUNK_ROWS * model.vocab_size


def _layer_block_bytes(work: ModelWork) -> int:
    return KV_BLOCK_TOKENS * max(layer.attention.kv_token_bytes for layer in work.kinds)


def _mixed_bytes(work: ModelWork) -> int:
    """Bytes of a token of what reading several streams allocates."""
    return work.stream_working_size * work.bytes_per_element


def _routed(work: ModelWork, tokens: int) -> int:
    top_k = max(layer.top_k for layer in work.kinds)
    elements = work.residual_size + work.hidden_size + work.has_latent_experts * work.expert_input
    elements += work.ngram_width
    floats = 2 * top_k + work.stream_factors
    return tokens * (elements * work.bytes_per_element + floats * FLOAT_BYTES)


def _intermediates(model: ModelSpec, work: ModelWork, tokens: int, groups: int) -> int:
    largest = max(_ffn_intermediates(layer, work, tokens, groups) for layer in work.kinds)
    decoding = DECODING_BYTES if model.quantization or model.has_float_head else 0
    return largest + decoding + logit_bytes(model) + DEVICE_RUNTIME_BYTES


def _selection_intermediates(work: ModelWork, tokens: int) -> int:
    """Bytes of the positions that tokens choose, and of what attends to them at once."""
    chosen = max((layer.attention.num_chosen or 0 for layer in work.kinds), default=0)
    return tokens * chosen * FLOAT_BYTES + SELECTION_BYTES if chosen else 0


def _state_intermediates(work: ModelWork, tokens: int) -> int:
    """Bytes of a layer with states: its mixed inputs, decays and gains, and what is read.

    Chunks of long prompts come on top (`kernels.gpu_state`).
    """
    layers = [layer.attention for layer in work.kinds if layer.attention.state is not None]
    if not layers:
        return 0
    element = work.bytes_per_element
    of_token = max(
        (mixed + 2 * read) * element + 4 * FLOAT_BYTES * (decays + gains)
        for mixed, decays, gains, read in (layer.token_sizes for layer in layers)
    )
    return tokens * of_token + SCAN_BYTES


def _ffn_intermediates(layer: LayerWork, work: ModelWork, tokens: int, groups: int) -> int:
    """Bytes of a layer's feed-forward intermediates: torch experts, our tiled kernel or dense.

    Torch's experts hold float32 sums of all tokens, and of one expert's rows the inputs and three
    matrices, or results and float32 weighted results and sums. Our kernel holds gated products and
    float32 results of the rows that it computes at once and a copy of the inputs.
    """
    element, size = work.bytes_per_element, layer.expert_input
    rows, wide = tokens * layer.top_k, layer.expert_hidden
    busiest = min(tokens, UNEVENNESS * rows // max(layer.num_experts, 1))
    of_row = size * element + max(3 * wide * element, 2 * size * FLOAT_BYTES)
    one_by_one = tokens * size * FLOAT_BYTES + busiest * of_row
    at_once = rows_at_once(rows, 1 / groups)
    in_tiles = at_once * (wide * element + size * FLOAT_BYTES) + tokens * size * element
    dense = 3 * tokens * layer.common_hidden * element
    return max(one_by_one, in_tiles, dense)
