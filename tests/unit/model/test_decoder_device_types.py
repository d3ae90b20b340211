"""No operation of a decoder on device memory meets a tensor of the host: looked at without a GPU.

Tensors on torch's device "meta" have a type and a shape and no data; most operations on one of
them and one of the host are refused, as they are between CUDA and the host. The loop over experts
and dynamic rotations ask for numbers, which such tensors do not have; they are not looked at.
"""

import re

import pytest
import torch
from torch import Tensor

from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.tensors import to_device
from raymoe.model.decoder import Decoder, cache_layouts
from raymoe.model.loading import PagedLoader
from raymoe.specs.attention.ngrams import NGRAM_TABLE
from raymoe.specs.layer_weights import EMBEDDING, HEAD, TOKEN_EXPERTS, layer_parts, layer_prefix
from raymoe.specs.model import DenseSpec, ModelSpec
from raymoe.specs.weight_names import model_weights
from tests.parity.cases import get_case
from tests.parity.configurations import CONFIGURATIONS
from tests.unit.model.test_decoder import OF_EACH_KIND

DEVICE = torch.device("meta")
BATCH = AttentionBatch(
    query_start=torch.tensor([0, 1, 4, 9], dtype=torch.int32),
    context_tokens=torch.tensor([40, 4, 70], dtype=torch.int32),
    block_table=torch.arange(9, dtype=torch.int32).view(3, 3),
    slots=torch.tensor([2, 0, 1], dtype=torch.int32),
)
NUM_TOKENS = 9
HASHES = re.compile(r"layers\.(\d+)\.ngrams\.(multipliers|sizes|offsets)$")


def weights_on_device(spec: ModelSpec) -> dict[str, Tensor]:
    """Neighbours where one projection reads several, as `PagedLoader` expects."""
    weights = {
        name: torch.empty(shape, device=DEVICE) for name, shape in model_weights(spec).items()
    }
    for i, layer in enumerate(spec.layers):
        for part in layer_parts(layer, spec.hidden_size):
            sizes = {name: torch.Size(shape).numel() for name, shape in part.shapes.items()}
            memory = torch.empty(sum(sizes.values()), device=DEVICE).split(list(sizes.values()))
            for (name, shape), piece in zip(part.shapes.items(), memory, strict=True):
                weights[layer_prefix(i) + name] = piece.view(shape)
        if layer.ngrams is not None:
            table = torch.empty(layer.ngrams.table_bytes, dtype=torch.uint8)
            weights[layer_prefix(i) + NGRAM_TABLE] = table
    weights[EMBEDDING] = torch.empty(spec.vocab_size, spec.hidden_size)
    weights.setdefault(HEAD, torch.empty(spec.vocab_size, spec.hidden_size, device=DEVICE))
    return weights


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(c.name, marks=[] if c in OF_EACH_KIND else pytest.mark.slow)
        for c in CONFIGURATIONS
        if "dynamic" not in c.name
    ],
    ids=str,
)
@torch.inference_mode()
def test_what_a_layer_computes_stays_on_the_device(name: str) -> None:
    spec = ModelSpec.from_directory(get_case(name).directory)
    shapes = model_weights(spec)

    def on_host(name: str) -> Tensor:
        if name.endswith(TOKEN_EXPERTS):
            return torch.arange(shapes[name][1]).expand(shapes[name])
        found = HASHES.search(name)
        if found is not None:
            return torch.tensor(getattr(spec.layers[int(found[1])].ngrams, found[2]))
        return torch.empty(shapes[name])

    decoder = Decoder(
        spec,
        PagedLoader(weights_on_device(spec).__getitem__, on_host, torch.float32, DEVICE),
        lambda _names: None,
    )
    layouts = cache_layouts(spec, torch.float32)
    with_kv = next((layout for layout in layouts if not layout.sequence_bytes), layouts[0])
    batch = to_device(decoder.staged_batch(BATCH, with_kv, DEVICE, with_states=BATCH), DEVICE)
    hidden_TH = torch.empty(NUM_TOKENS, spec.residual_size, device=DEVICE)
    tokens_T = torch.empty(NUM_TOKENS, dtype=torch.int32, device=DEVICE)
    experts_NTK = decoder.experts_of_tokens(torch.zeros(NUM_TOKENS, dtype=torch.int64))
    if experts_NTK is not None:
        experts_NTK = experts_NTK.to(DEVICE)
    ngrams_NTE = decoder.ngrams_of_tokens(
        torch.zeros(NUM_TOKENS, dtype=torch.int64), torch.tensor([0, NUM_TOKENS]), None
    )
    if ngrams_NTE is not None:
        ngrams_NTE = ngrams_NTE.to(DEVICE)
    decoder.reserve(70)
    for i, layer in enumerate(spec.layers):
        projected = decoder.pre(i, hidden_TH, tokens_T, tokens_T, ngrams_NTE=ngrams_NTE)
        staged = torch.empty(9, *layouts[i].block_shape, device=DEVICE)
        if layouts[i].sequence_bytes:
            num_bytes = 9 * layouts[i].block_bytes + 3 * layouts[i].sequence_bytes
            staged = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
        attention_TX = decoder.attend_staged(i, projected, staged, batch)
        assert attention_TX.device == DEVICE
        hidden_TH, normed_TH, routing, factors_TF = decoder.post(
            i, hidden_TH, attention_TX, experts_NTK=experts_NTK
        )
        if isinstance(layer.ffn, DenseSpec):
            hidden_TH = decoder.ffn(i, hidden_TH, normed_TH, routing, factors_TF=factors_TF)
        else:
            assert routing is not None
            assert routing.topk_weights_TK.device == DEVICE
    logits_RV = decoder.logits(decoder.final(hidden_TH, tokens_T[:2].long()))
    assert logits_RV.device == DEVICE
