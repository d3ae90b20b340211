"""Latent attention of whole models and of layers as wide as published ones, in both forms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from raymoe.device.threads import set_num_threads
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.kernels.cpu_linear import packed_linear_is_used
from raymoe.kernels.paged_kv import BLOCK_TOKENS
from raymoe.memory.arena import HostArena
from raymoe.model.attention import LatentAttention
from raymoe.model.decoder import cache_layouts
from raymoe.model.loading import Loader
from raymoe.model.rope import Rotary
from raymoe.specs.attention.latent import LatentAttentionSpec
from raymoe.specs.model import ModelSpec
from tests.parity.cases import get_case
from tests.parity.driver import Driver, generate, load_decoder
from tests.parity.latent_families import LATENT_FAMILIES
from tests.parity.oracle import ROWS
from tests.unit.specs.config_classes import config_of, written

QUICK = ("deepseek_v2", "deepseek_v3", "deepseek_v32")  # queries direct, by a latent, indexed
FORMS = {
    "plain": lambda batch, _heads: batch.num_new,
    "absorbed": lambda batch, _heads: torch.zeros_like(batch.num_new),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(1)  # matrices this small only wait for a second thread


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Use one form for everything, generated tokens included."""
    return lambda form: monkeypatch.setattr(
        LatentAttention, "_num_plain", staticmethod(FORMS[form])
    )


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
        for family in LATENT_FAMILIES
    ],
)
def test_either_form_alone_gives_the_tokens_of_transformers(
    family: str, choose: Callable[[str], None]
) -> None:
    case = get_case(f"{family}: plain")
    decoder, prompts = load_decoder(case.directory), case.reference.prompts[:6]
    for form in FORMS:
        choose(form)
        assert generate(decoder, prompts, ROWS.max_new_tokens) == case.reference.tokens[:6]


@pytest.mark.parametrize("family", LATENT_FAMILIES)
def test_both_forms_give_the_same_logits(family: str, choose: Callable[[str], None]) -> None:
    case = get_case(f"{family}: plain")
    decoder = load_decoder(case.directory)
    rows = [
        prompt + tokens
        for prompt, tokens in zip(case.reference.prompts, case.reference.tokens, strict=True)
    ]
    logits = {}
    for form in FORMS:
        choose(form)
        driver = Driver(decoder, rows, 0)
        steps = [driver.run_step([(0, len(row) - 9) for row in rows])]
        steps += [driver.run_step([(len(r) - n, len(r) - n + 1) for r in rows]) for n in (9, 8, 7)]
        logits[form] = torch.cat(steps)
    torch.testing.assert_close(logits["plain"], logits["absorbed"], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    not packed_linear_is_used(torch.bfloat16), reason="other products depend on the batch"
)
def test_in_bfloat16_no_bit_depends_on_how_a_prompt_was_cut_or_on_its_company() -> None:
    case = get_case("deepseek_v3: narrow latent, pairs apart, no dense layer")
    decoder = load_decoder(case.directory, torch.bfloat16)
    lengths = (9, 33, 70)  # from 33 on attended to in plain form
    prompts = [next(p for p in case.reference.prompts if len(p) == n) for n in lengths]
    driver = Driver(decoder, prompts, 1)
    whole = driver.run_step([(0, len(prompt)) for prompt in prompts]).split(
        [len(prompt) for prompt in prompts]
    )
    for row, prompt in enumerate(prompts):
        for chunk in (1, 7) if len(prompt) < 40 else (7, 40):
            alone = Driver(decoder, [prompt], 1)
            ends = range(0, len(prompt), chunk)
            parts = [alone.run_step([(n, min(n + chunk, len(prompt)))]) for n in ends]
            assert torch.equal(torch.cat(parts), whole[row])


class Wide:
    """The attention of one layer as wide as the defaults of its family, in both libraries."""

    def __init__(self, family: str, **fields: Any) -> None:
        config = config_of(family, num_hidden_layers=1, attn_implementation="eager", **fields)
        self.spec = ModelSpec.from_config(written(config))
        module = getattr(transformers.models, family)
        name = type(config).__name__.removesuffix("Config")
        source = getattr(module, f"modeling_{family}")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.theirs = getattr(source, f"{name}Attention")(config, 0).eval()
            self.rotary = getattr(source, f"{name}RotaryEmbedding")(config)
            for parameter in self.theirs.parameters():
                torch.nn.init.normal_(parameter, std=max(parameter.shape) ** -0.5)
            self.hidden_TH = torch.randn(400, config.hidden_size)
        weights = {f"x.{key}": value for key, value in self.theirs.state_dict().items()}
        attention = self.spec.layers[0].attention
        assert isinstance(attention, LatentAttentionSpec)
        self.ours = LatentAttention(
            attention,
            Loader(weights.__getitem__, HostArena(0).allocate, torch.float32),
            "x.",
            is_interleaved=self.spec.ropes[0].is_interleaved,
        )

    def expected(self) -> Tensor:
        positions = torch.arange(len(self.hidden_TH))[None]
        hidden = torch.triu(torch.full((len(self.hidden_TH),) * 2, -torch.inf), 1)
        return self.theirs(
            self.hidden_TH[None],
            position_embeddings=self.rotary(self.hidden_TH, positions),
            attention_mask=hidden[None, None],
        )[0][0]

    def run(self, new_tokens: list[int]) -> Tensor:
        """A sequence that enters in chunks of so many tokens."""
        layout = cache_layouts(self.spec, torch.float32)[0]
        num_blocks = -(-len(self.hidden_TH) // BLOCK_TOKENS)
        cache = torch.full((num_blocks, *layout.block_shape), torch.nan)
        rotary = Rotary(self.spec.ropes[0])
        rotary.reserve(len(self.hidden_TH))
        out, context = [], 0
        for count in new_tokens:
            positions = torch.arange(context, context + count, dtype=torch.int32)
            context += count
            batch = AttentionBatch(
                query_start=torch.tensor([0, count], dtype=torch.int32),
                context_tokens=torch.tensor([context], dtype=torch.int32),
                block_table=torch.arange(num_blocks, dtype=torch.int32)[None],
            )
            projected = self.ours.project(
                self.hidden_TH[positions.long()], rotary.angles(positions)
            )
            out.append(self.ours.output(self.ours.attend(projected, cache, batch)))
        return torch.cat(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("deepseek_v2", {"q_lora_rank": None, "num_attention_heads": 16, "hidden_size": 2048}),
        ("deepseek_v3", {}),
        ("glm4_moe_lite", {}),
    ],
)
@torch.inference_mode()
def test_a_layer_as_wide_as_published_is_that_of_transformers(
    family: str, fields: dict[str, Any]
) -> None:
    wide = Wide(family, **fields)
    want = wide.expected()
    for chunks in ([400], [350, 40, 10], [399, 1]):
        torch.testing.assert_close(wide.run(chunks), want, rtol=1e-4, atol=1e-4)
