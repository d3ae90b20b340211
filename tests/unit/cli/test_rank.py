"""`raymoe plan` without a node ranks instances by the cost of a token."""

import json
from pathlib import Path

import pytest

from raymoe.cli import run
from raymoe.plan.rank import PRICES
from raymoe.plan.search import find_plan
from raymoe.specs.hardware import HARDWARE_INSTANCES
from raymoe.specs.model import ModelSpec
from tests.unit.cli.test_plan import CONFIG, JOB, WORKLOAD, words

LARGE = CONFIG | {"num_hidden_layers": 20}  # 55 GB: an instance with 16 GiB is too small


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    return str(tmp_path)


def prices_in(tmp_path: Path, prices: object) -> tuple[str, str]:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(prices))
    return "--prices", str(path)


def test_the_cheapest_token_comes_first_and_what_does_not_fit_last(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = {"g6.xlarge": 0.8, "g4dn.8xlarge": 90.0, "g5.8xlarge": 1.6}
    arguments = ["plan", "--model", model, *JOB, *prices_in(tmp_path, prices)]
    assert run([*arguments, "--json"]) == 0
    ranked = json.loads(capsys.readouterr().out)
    assert [offer["node"] for offer in ranked] == ["g5.8xlarge", "g4dn.8xlarge", "g6.xlarge"]
    assert "of host memory" in ranked[-1]["problem"]
    plan = find_plan(ModelSpec.from_config(LARGE), HARDWARE_INSTANCES["g5.8xlarge"], WORKLOAD)
    assert ranked[0]["tokens_per_s"] == pytest.approx(plan.tokens_per_s)
    cost = plan.cost_per_million_tokens(1.6)
    assert ranked[0]["cost_per_million_tokens"] == pytest.approx(cost)
    assert run(arguments) == 0
    text = words(capsys.readouterr().out)
    assert f"g5.8xlarge 1.60 {plan.tokens_per_s:,.0f} {cost:.2f}" in text
    assert "g6.xlarge 0.80 - - - does not fit" in text


@pytest.mark.parametrize(
    ("prices", "problem"),
    [
        ({"g9.xlarge": 1.0}, "'g9.xlarge' is no known instance"),
        ({"g6.xlarge": "much"}, "has the price 'much'"),
        ({"g6.xlarge": True}, "has the price True"),
        ([], "takes an object"),
    ],
)
def test_bad_prices_are_named(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], prices: object, problem: str
) -> None:
    assert run(["plan", "--model", model, *prices_in(tmp_path, prices)]) == 2
    assert problem in words(capsys.readouterr().err)


def test_options_of_one_node_need_one(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "--model", model, "--what-if", "--host-memory", "30GiB"]) == 2
    assert "--host-memory, --what-if: about one node" in words(capsys.readouterr().err)
    assert run(["plan", "--model", model, "--hardware", "l4", "--prices", "x.json"]) == 2
    assert "--prices ranks instances" in words(capsys.readouterr().err)


def test_every_price_is_of_an_instance_with_one_gpu() -> None:
    assert all("(1 x " in HARDWARE_INSTANCES[name].name for name in PRICES)
