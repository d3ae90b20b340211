"""Postprocessing: a row whose function raises is an error row, if rows may fail."""

import pytest

from raymoe.data.processor import Processor

GOOD = {"prompt": "a", "generated_text": "1", "__inference_error__": ""}
BAD = {"prompt": "b", "generated_text": "no number", "__inference_error__": ""}


def processor(*, should_continue_on_error: bool) -> Processor:
    return Processor(
        model_source="m", operator_kwargs={}, output_names=frozenset(), is_chat=False,
        preprocess=dict, postprocess=lambda row: {"number": int(row.pop("generated_text"))},
        preprocess_map_kwargs={}, postprocess_map_kwargs={},
        should_continue_on_error=should_continue_on_error,
    )  # fmt: skip


def test_a_row_that_cannot_be_postprocessed_is_an_error_row():
    finish = processor(should_continue_on_error=True)._after
    assert finish(dict(GOOD)) == {"number": 1, "__inference_error__": ""}
    failed = finish(dict(BAD))
    message = failed.pop("__inference_error__")
    assert message.startswith("ValueError: while postprocessing the row: invalid literal")
    assert failed.items() <= BAD.items()
    assert failed["generated_text"] == "no number"


def test_without_leave_to_fail_the_error_is_raised():
    with pytest.raises(ValueError, match="invalid literal"):
        processor(should_continue_on_error=False)._after(dict(BAD))
