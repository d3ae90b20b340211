"""The reference names all that is public, with examples, and its pages build."""

import doctest
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import raymoe

ROOT = Path(__file__).parent.parent
PAGES = {
    path.stem: re.findall(r"^::: raymoe\.(\w+)$", path.read_text(), re.MULTILINE)
    for path in sorted((ROOT / "docs" / "reference").glob("*.md"))
}
NAMES = [name for names in PAGES.values() for name in names]


def examples_of(name: str) -> list[doctest.Example]:
    """Those of its docstring; of an error also those of its base."""
    value = getattr(raymoe, name)
    owners = value.__mro__ if inspect.isclass(value) else (value,)
    found = (doctest.DocTestParser().get_examples(inspect.getdoc(owner) or "") for owner in owners)
    return next((examples for examples in found if examples), [])


def test_the_pages_have_each_public_name_once() -> None:
    assert sorted(NAMES) == sorted({*raymoe.__all__} - {"__version__"})


@pytest.mark.parametrize(("page", "name"), [(page, name) for page in PAGES for name in PAGES[page]])
def test_a_public_name_has_an_example_or_is_in_one_of_its_page(page: str, name: str) -> None:
    sources = [example.source for other in PAGES[page] for example in examples_of(other)]
    for source in sources:
        compile(source, name, "exec")
    assert examples_of(name) or f"raymoe.{name}(" in "".join(sources)


@pytest.mark.slow
def test_the_pages_build_and_their_links_lead_somewhere() -> None:
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("needs pip install '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "tools.build_site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "griffe" not in done.stdout + done.stderr  # it warns without failing
