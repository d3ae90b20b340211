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


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example(name: str) -> None:
    for example in examples_of(name) or pytest.fail("its docstring has no line with >>>"):
        compile(example.source, name, "exec")


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
