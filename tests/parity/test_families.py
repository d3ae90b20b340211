"""The decoder generates the tokens of transformers, for every family and every oddity."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raymoe.device.threads import set_num_threads
from tests.parity.cases import get_case
from tests.parity.configurations import CONFIGURATIONS, FAMILY_CONFIGS, first_of_each_family
from tests.parity.driver import Driver, generate, load_decoder
from tests.parity.oracle import ROWS, make_checkpoint

NUM_LONG, CHUNK = 8192, 1030  # chunks do not divide it

# Families of kinds that others show.
OF_SHOWN_KINDS = {
    *("glm4", "olmo2", "seed_oss", "ernie4_5", "exaone4", "hunyuan_v1_dense", "internlm3"),
    *("iquestcoder", "qwen3_5", "exaone4_5", "cohere", "cohere2", "cohere_compass_text"),
    *("cohere_compass", "lfm2"),
}
PLAIN = {c.name for c in first_of_each_family() if c.family not in OF_SHOWN_KINDS}
# Of each kind of layer one, with rows of every length; of other families a few rows.
OF_EACH_KIND = {
    *("mixtral", "gpt_oss", "deepseek_v3", "gemma4_text", "llama4_text", "dbrx", "cohere2_moe"),
    *("qwen3_next", "granitemoehybrid", "lfm2_moe", "kimi_linear", "glm5_next", "deepseek_v4"),
}


def named(quick: set[str]) -> list[Any]:
    return [
        pytest.param(c.name, marks=[] if c.name in quick else pytest.mark.slow)
        for c in CONFIGURATIONS
    ]


NAMES = named(PLAIN)
KINDS = {name for name in PLAIN if name.partition(":")[0] in OF_EACH_KIND}
FEW_NAMES = named(KINDS)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(1)  # matrices this small only wait for a second thread


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_in_one_batch_are_those_of_transformers(name: str) -> None:
    case = get_case(name)
    reference = case.few_rows if name in PLAIN - KINDS else case.reference
    max_new_tokens = len(reference.tokens[0])
    tokens = generate(load_decoder(case.directory), reference.prompts, max_new_tokens)
    assert tokens == reference.tokens


@pytest.mark.parametrize("name", FEW_NAMES)
def test_prompts_in_chunks_of_7_give_the_same_tokens(name: str) -> None:
    case = get_case(name)
    tokens = generate(
        load_decoder(case.directory), case.reference.prompts, ROWS.max_new_tokens, chunk_tokens=7
    )
    assert tokens == case.reference.tokens


@pytest.mark.parametrize("name", FEW_NAMES)
def test_rows_alone_and_in_other_company_give_the_same_tokens(name: str) -> None:
    case = get_case(name)
    decoder = load_decoder(case.directory)
    prompts, tokens = case.reference.prompts, case.reference.tokens
    for row in (0, 3):
        assert generate(decoder, [prompts[row]], ROWS.max_new_tokens) == [tokens[row]]
    assert generate(decoder, prompts[::-3], ROWS.max_new_tokens) == tokens[::-3]


def test_families_with_experts_have_at_least_six_configurations_and_dense_ones_three() -> None:
    counts = Counter(c.family for c in CONFIGURATIONS)
    with_experts = {c.family for c in CONFIGURATIONS if "expert" in str(c.fields)}
    assert counts.keys() == FAMILY_CONFIGS.keys()
    assert min(counts[family] for family in with_experts) >= 6
    assert min(counts.values()) >= 3


def test_prompts_reach_beyond_windows_blocks_and_rope_borders() -> None:
    lengths = {len(prompt) for prompt in get_case("mixtral: plain").reference.prompts}
    assert {1, 32, 33, 70} <= lengths


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["qwen3_next", "qwen3_5_moe_text", "kimi_linear", "bailing_hybrid"]
)
@torch.inference_mode()
def test_states_of_8192_tokens_err_at_most_twice_as_much_as_plain_torch(
    family: str, tmp_path: Path
) -> None:
    (plain,) = (c for c in CONFIGURATIONS if c.name == f"{family}: plain")
    fields = plain.fields | {"max_position_embeddings": NUM_LONG, "initializer_range": 0.1}
    model = make_checkpoint(replace(plain, fields=fields), tmp_path)
    model.set_attn_implementation("sdpa")
    tokens = torch.randint(
        plain.vocab_size, (NUM_LONG,), generator=torch.Generator().manual_seed(9)
    )
    exact_TV = model(tokens[None]).logits[0, -512:].double()
    plain_TV = model.to(torch.bfloat16)(tokens[None]).logits[0, -512:].double()
    errors = {}
    for dtype in (torch.float32, torch.bfloat16):
        driver = Driver(load_decoder(tmp_path, dtype), [tokens.tolist()], 1)
        for begin in range(0, NUM_LONG, CHUNK):
            logits_TV = driver.run_step([(begin, min(begin + CHUNK, NUM_LONG))])
        errors[dtype] = (logits_TV[-512:].double() - exact_TV).norm() / exact_TV.norm()
    plain_error = (plain_TV - exact_TV).norm() / exact_TV.norm()
    assert errors[torch.float32] < 1e-3
    assert errors[torch.bfloat16] <= 2 * plain_error
