"""Postprocessing: a row whose function raises is an error row, if rows may fail."""

import functools

import pytest

from raymoe.data.processor import Processor, _around

GOOD = {"prompt": "a", "generated_text": "1", "__inference_error__": "", "__request__": None}
BAD = GOOD | {"prompt": "b", "generated_text": "no number"}


def number(row):
    return {"number": int(row.pop("generated_text"))}


def processor(*, should_continue_on_error: bool) -> Processor:
    return Processor(
        model_source="m", model_name="m", operator_kwargs={}, output_names=frozenset(),
        is_chat=False, preprocess=dict, postprocess=number,
        preprocess_map_kwargs={}, postprocess_map_kwargs={},
        should_continue_on_error=should_continue_on_error,
    )  # fmt: skip


def test_a_row_that_cannot_be_postprocessed_is_an_error_row():
    finish = functools.partial(processor(should_continue_on_error=True)._after, number)
    assert finish(dict(GOOD)) == {"number": 1, "__inference_error__": ""}
    failed = finish(dict(BAD))
    message = failed.pop("__inference_error__")
    assert message.startswith("ValueError: while postprocessing the row: invalid literal")
    assert (failed["prompt"], failed["generated_text"]) == ("b", "no number")


def test_without_leave_to_fail_the_error_is_raised():
    with pytest.raises(ValueError, match="invalid literal"):
        processor(should_continue_on_error=False)._after(number, dict(BAD))


class Adds:
    """What a user of Ray gives to `Dataset.map` with `fn_constructor_kwargs`."""

    def __init__(self, suffix="!"):
        self._suffix = suffix

    def __call__(self, row):
        return {"prompt": row["text"] + self._suffix}


class AddsLater(Adds):
    async def __call__(self, row):
        return super().__call__(row)


async def add(row):
    return {"prompt": row["text"] + "!"}


@pytest.mark.parametrize("function", [Adds, AddsLater, Adds(), AddsLater(), add])
def test_rows_go_through_functions_objects_classes_and_coroutines(function):
    before = _around(function, lambda call, row: row | call(row))
    assert isinstance(before, type) == isinstance(function, type)
    if isinstance(before, type):
        assert before("?")({"text": "a"})["prompt"] == "a?"
        before = before()
    assert before({"text": "a"}) == {"text": "a", "prompt": "a!"}


def test_the_one_stage_has_a_name():
    own = processor(should_continue_on_error=True)
    (name,) = own.list_stage_names()
    assert own.get_stage_by_name(name).fn.__name__ == name
    with pytest.raises(ValueError, match="Stage vLLMEngineStage not found; the one stage is MoEG"):
        own.get_stage_by_name("vLLMEngineStage")
