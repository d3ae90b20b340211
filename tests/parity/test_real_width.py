"""One layer of every known model in its real width gives the logits of transformers.

Of more experts than memory holds there are fewer; all else is as wide as it is published.
"""

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from raymoe.specs.families import MODEL_TYPE_ALIASES
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS
from tests.parity.driver import Driver, load_decoder
from tests.parity.oracle import randomise

pytestmark = pytest.mark.slow

MAX_BYTES = 7 * 10**9  # of the float32 weights of a layer
VOCABULARY = 128
PROMPT_LENGTHS = (1, 40, 17)
# Of the largest logit: sums of ten thousand float32 products in another order.
TOLERANCE = 1e-4
EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")


def one_layer(name: str) -> dict[str, Any]:
    """The configuration of a known model with one layer of each kind, and experts that fit."""
    fields = dict(MODEL_PRESETS[name]) | {"vocab_size": VOCABULARY, "torch_dtype": "float32"}
    fields["model_type"] = MODEL_TYPE_ALIASES.get(fields["model_type"], fields["model_type"])
    fields.pop("quantization_config", None)
    fields["n_layers" if name == "dbrx" else "num_hidden_layers"] = 1
    if name == "dbrx":  # transformers 5.23 does not look for the base where it is published
        rope = {"rope_type": "default", "rope_theta": fields["attn_config"]["rope_theta"]}
        fields["rope_parameters"] = rope
    if "full_attention_interval" in fields:  # a layer of each kind
        fields |= {"num_hidden_layers": 2, "full_attention_interval": 2}
    if "linear_attn_config" in fields:
        lists = {"kda_layers": [1], "full_attn_layers": [2]}
        fields |= {
            "num_hidden_layers": 2,
            "linear_attn_config": fields["linear_attn_config"] | lists,
        }
    if "hybrid_override_pattern" in fields:
        fields["hybrid_override_pattern"] = "ME*"
        fields["time_step_min"] = 1e-30  # a bound that transformers has for prompts alone
    if "first_k_dense_replace" in fields:
        fields["first_k_dense_replace"] = 0
    return next(fitting for fitting in fewer_experts(fields) if num_bytes(fitting) <= MAX_BYTES)


def fewer_experts(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The same with half of the experts, and half of those, and so on."""
    while True:
        yield fields
        ffn = fields.get("ffn_config")
        if ffn is not None:
            fewer = {"ffn_config": ffn | {"moe_num_experts": ffn["moe_num_experts"] // 2}}
        else:
            fewer = {field: fields[field] // 2 for field in EXPERTS if field in fields}
        fields = fields | fewer


def num_bytes(fields: dict[str, Any]) -> int:
    return 4 * ModelSpec.from_config(fields).num_parameters


def make_layer(fields: dict[str, Any], directory: Path) -> None:
    """Save a random model of one layer."""
    config = transformers.AutoConfig.for_model(**fields)
    for token in ("eos_token_id", "bos_token_id", "pad_token_id"):
        setattr(config, token, None)
    with torch.random.fork_rng():
        torch.manual_seed(len(str(directory)))
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        randomise(model)
    expected = [model(torch.tensor([prompt])).logits[0] for prompt in prompts()]
    torch.save(expected, directory / "expected")
    model.save_pretrained(directory)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        for length in PROMPT_LENGTHS
    ]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Removed at once: pytest would keep the models of all cases, up to 7 GB each."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.mark.parametrize("name", MODEL_PRESETS)
@torch.inference_mode()
def test_a_layer_in_its_real_width_gives_the_logits_of_transformers(
    name: str, directory: Path
) -> None:
    fields = one_layer(name)
    make_layer(fields, directory)
    gc.collect()
    decoder = load_decoder(directory)
    rows = prompts()
    logits_TV = Driver(decoder, rows, 0).run_step([(0, len(row)) for row in rows])
    expected_TV = torch.cat(torch.load(directory / "expected"))
    worst = float((logits_TV - expected_TV).abs().max() / expected_TV.abs().max())
    assert worst < TOLERANCE, f"{worst:.1e}"
