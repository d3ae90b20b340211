"""The examples of the reference give what they show."""

import dataclasses
import doctest
import warnings

import pandas
import pytest
import ray

import raymoe
from tests.test_reference import PAGES, examples_of

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.*"),
    pytest.mark.usefixtures("local_ray"),
]


@pytest.mark.parametrize("page", [page for page, names in PAGES.items() if names])
def test_the_examples_of_a_page_run_one_after_the_other(page: str) -> None:
    modules = (dataclasses, pandas, ray, raymoe, warnings)
    names = {module.__name__: module for module in modules}
    wrong: list[str] = []
    with warnings.catch_warnings():
        for name in PAGES[page]:
            test = doctest.DocTest(examples_of(name), names, name, page, 0, None)
            doctest.DocTestRunner().run(test, out=wrong.append, clear_globs=False)
            names = test.globs
    assert "".join(wrong) == ""
