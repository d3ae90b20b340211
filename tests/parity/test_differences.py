"""Where results differ from transformers on purpose: each case still differs, and as described.

When a test fails because transformers computes what raymoe does, its entry goes.
"""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from raymoe.cli import run
from raymoe.memory.weights import WeightStore
from raymoe.specs.differences import DIFFERENCES, differences_of
from raymoe.specs.model import ModelSpec
from tests.parity.configurations import CONFIGURATIONS, Configuration
from tests.parity.driver import Driver, load_decoder
from tests.parity.oracle import as_stored, make_checkpoint
from tests.reference import ReferenceModel

PROMPT = [7, 3, 50, 12, 9, 31, 2, 44, 60, 5, 18]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def configuration(name: str, **changes: object) -> Configuration:
    found = next(one for one in CONFIGURATIONS if one.name == name)
    return dataclasses.replace(found, fields=copy.deepcopy(found.fields) | changes)


@torch.inference_mode()
def logits_of_transformers(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0]


def logits(directory: Path, tokens: list[int]) -> Tensor:
    return Driver(load_decoder(directory), [tokens], 1).run_step([(0, len(tokens))])


def is_close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, atol=2e-4, rtol=1e-4)


def test_nemotron_has_no_bound_of_time_steps_in_prompts(tmp_path: Path) -> None:
    bounded, free = (
        make_checkpoint(
            configuration("nemotron_h: plain", time_step_min=bound), tmp_path / str(bound)
        )
        for bound in (1.0, 1e-30)
    )
    wanted = logits_of_transformers(free, PROMPT)
    assert not is_close(logits_of_transformers(bounded, PROMPT), wanted)
    for bound in (1.0, 1e-30):
        assert is_close(logits(tmp_path / str(bound), PROMPT), wanted)


LIMITS = {
    "expert_swiglu_limit_list": [0, 0, 0.5, 0.25, 4],  # the last is that of a predicting layer
    "share_expert_swiglu_limit_list": [0, 0.75, 0, 0.25, 7],
}


def test_networks_of_ling_have_the_limits_that_they_were_trained_with(tmp_path: Path) -> None:
    limited, free = (
        make_checkpoint(configuration("bailing_hybrid: plain", **limits), tmp_path / name)
        for name, limits in (("limited", LIMITS), ("free", {}))
    )
    wanted = logits_of_transformers(free, PROMPT)
    assert is_close(logits(tmp_path / "free", PROMPT), wanted)
    assert torch.equal(logits_of_transformers(limited, PROMPT), wanted)
    spec = ModelSpec.from_directory(tmp_path / "limited")
    weights = WeightStore.open(spec, tmp_path / "limited")
    expected = ReferenceModel(spec, weights, torch.float64).logits(PROMPT).float()
    assert not is_close(expected, wanted)
    assert is_close(logits(tmp_path / "limited", PROMPT), expected)
    for name in LIMITS:  # each alone differs too
        one = ReferenceModel(
            ModelSpec.from_config(limited.config.to_dict() | {name: None}), weights, torch.float64
        )
        assert not is_close(one.logits(PROMPT).float(), expected)


def test_a_row_is_rotated_for_its_own_length(tmp_path: Path) -> None:
    model = make_checkpoint(configuration("llama: dynamic rope"), tmp_path)
    alone = logits_of_transformers(model, PROMPT)
    longest = 2 * model.config.max_position_embeddings
    padded = torch.zeros(2, longest, dtype=torch.long)
    padded[0] = torch.arange(longest) % 60
    padded[1, -len(PROMPT) :] = torch.tensor(PROMPT)
    mask = torch.ones_like(padded)
    mask[1, : -len(PROMPT)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.inference_mode():
        both = model(padded, attention_mask=mask, position_ids=positions).logits
    assert not is_close(both[1, -len(PROMPT) :], alone)
    driver = Driver(load_decoder(tmp_path), [padded[0].tolist(), PROMPT], 1)
    found = driver.run_step([(0, longest), (0, len(PROMPT))])
    assert is_close(found[longest:], alone)


def test_hy4_rotates_neighbours_and_norms_latents_as_its_weights_need(tmp_path: Path) -> None:
    model = make_checkpoint(configuration("hy_v4: plain", rms_norm_eps=1e-2), tmp_path)
    wanted = logits_of_transformers(model, PROMPT)
    assert is_close(logits(tmp_path, PROMPT), wanted)
    assert not is_close(logits_of_transformers(as_stored(model), PROMPT), wanted)
    with_norms_of_class = type(model)._from_config(model.config, dtype=torch.float32).eval()
    with_norms_of_class.load_state_dict(model.state_dict())
    assert not is_close(logits_of_transformers(with_norms_of_class, PROMPT), wanted)


NAMES = {
    "nemotron_h: plain": "time_step_min",
    "bailing_hybrid: plain": "expert_swiglu_limit_list",
    "llama: dynamic rope": "rotated for its own length",
    "hy_v4: plain": "neighbouring dimensions are rotated",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_differs_says_so(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = LIMITS if name.startswith("bailing_hybrid") else {}
    make_checkpoint(configuration(name, **changes), tmp_path)
    assert run(["models", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "differs from transformers" in printed
    (found,) = differences_of(ModelSpec.from_directory(tmp_path))
    assert NAMES[name] in found


def test_every_case_is_documented_and_has_a_model() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    rows = [line.replace("`", "") for line in page.splitlines() if line.startswith("| ")]
    for one in DIFFERENCES:
        (row,) = (row for row in rows if row.startswith(f"| {one.models} |"))
        assert one.what in row
        assert one.reason in row
    assert len(NAMES) == len(DIFFERENCES)
    assert not differences_of(ModelSpec.from_config({"model_type": "mixtral"}))
