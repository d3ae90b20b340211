"""Suggestions are what was meant, and never a name of another meaning."""

import dataclasses
import inspect

import pytest

import raymoe
from raymoe.config import EngineConfig, SamplingParams
from raymoe.errors import UnknownOptionError
from raymoe.structured import StructuredOutputs
from raymoe.suggestions import OTHER_NAMES, WITHOUT_COUNTERPART, find_meant, num_edits

SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]
ENGINE = [field.name for field in dataclasses.fields(EngineConfig)]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("stop_token", "stop_token_ids"),
        ("stoptokenids", "stop_token_ids"),
        ("frequence_penalty", "frequency_penalty"),
        ("maxNewTokens", "max_tokens"),
        ("num_return_sequences", "n"),
        ("eos_token_id", "stop_token_ids"),
        ("guided_json", "structured_outputs"),
        # Other words, however similar.
        ("begin_suppress_tokens", None),
        ("max_p", None),
        ("min_k", None),
        ("top_a", None),
        ("max_temperature", None),
        ("ignore_case", None),
        ("encoder_repetition_penalty", None),
        ("length_penalty", None),
        ("spaces_between_special_tokens", None),
    ],
)
def test_a_name_is_suggested_for_a_typing_error_or_another_name_of_the_same(name, meant):
    assert find_meant(name, SAMPLING) == meant


def test_no_option_is_suggested_for_another_one():
    for names in (SAMPLING, ENGINE):
        for name in names:
            rest = [other for other in names if other != name]
            meant = find_meant(name, rest)
            assert meant is None or meant.startswith(name), (name, meant)


@pytest.mark.parametrize("name", WITHOUT_COUNTERPART)
def test_what_is_absent_is_explained(name):
    for known, where in ((SAMPLING, "sampling parameter"), (ENGINE, "engine option")):
        error = UnknownOptionError(name, known, where)
        assert error.suggestion is None
        assert str(error) == f"unknown {where} {name!r}; {WITHOUT_COUNTERPART[name]}"


def test_other_names_lead_to_names_that_exist():
    structured = [field.name for field in dataclasses.fields(StructuredOutputs)]
    operator = inspect.signature(raymoe.MoEGenerator).parameters
    batches = inspect.signature(raymoe.map_batches_kwargs).parameters
    known = {*SAMPLING, *ENGINE, *structured, *operator, *batches}
    assert {name for names in OTHER_NAMES.values() for name in names} <= known
    assert not {*OTHER_NAMES, *WITHOUT_COUNTERPART} & {*SAMPLING, *ENGINE, *structured}
    assert not OTHER_NAMES.keys() & WITHOUT_COUNTERPART.keys()


@pytest.mark.parametrize(
    ("left", "right", "count"),
    [("", "abc", 3), ("abc", "acb", 1), ("kitten", "sitting", 3), ("a", "a", 0), ("ab", "b", 1)],
)
def test_edits_are_counted_with_swaps_of_neighbours(left, right, count):
    assert num_edits(left, right) == num_edits(right, left) == count
