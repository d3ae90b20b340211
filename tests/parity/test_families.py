"""The decoder generates the tokens of transformers, for every family and every oddity."""

import pytest

from raymoe.device.threads import set_num_threads
from tests.parity.cases import get_case
from tests.parity.configurations import CONFIGURATIONS, FAMILY_CONFIGS, first_of_each_family
from tests.parity.driver import generate, load_decoder
from tests.parity.oracle import MAX_NEW_TOKENS

PLAIN = {configuration.name for configuration in first_of_each_family()}
NAMES = [
    pytest.param(c.name, marks=[] if c.name in PLAIN else pytest.mark.slow) for c in CONFIGURATIONS
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    set_num_threads(1)  # matrices this small only wait for a second thread


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_in_one_batch_are_those_of_transformers(name: str) -> None:
    case = get_case(name)
    tokens = generate(load_decoder(case.directory), case.reference.prompts, MAX_NEW_TOKENS)
    assert tokens == case.reference.tokens


@pytest.mark.parametrize("name", NAMES)
def test_prompts_in_chunks_of_7_give_the_same_tokens(name: str) -> None:
    case = get_case(name)
    tokens = generate(
        load_decoder(case.directory), case.reference.prompts, MAX_NEW_TOKENS, chunk_tokens=7
    )
    assert tokens == case.reference.tokens


@pytest.mark.parametrize("name", NAMES)
def test_rows_alone_and_in_other_company_give_the_same_tokens(name: str) -> None:
    case = get_case(name)
    decoder = load_decoder(case.directory)
    prompts, tokens = case.reference.prompts, case.reference.tokens
    for row in (0, 3):
        assert generate(decoder, [prompts[row]], MAX_NEW_TOKENS) == [tokens[row]]
    assert generate(decoder, prompts[::-3], MAX_NEW_TOKENS) == tokens[::-3]


def test_every_family_has_at_least_six_configurations() -> None:
    counts = [
        sum(c.family == first.family for c in CONFIGURATIONS) for first in first_of_each_family()
    ]
    assert len(counts) == len(FAMILY_CONFIGS)
    assert min(counts) >= 6


def test_prompts_reach_beyond_windows_blocks_and_rope_borders() -> None:
    lengths = {len(prompt) for prompt in get_case("mixtral: plain").reference.prompts}
    assert {1, 32, 33, 70} <= lengths
