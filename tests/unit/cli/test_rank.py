"""`raymoe plan` without a node ranks instances by the cost of a token."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raymoe.cli import run
from raymoe.cli.plan import ranking_table
from raymoe.plan.plan import Plan
from raymoe.plan.rank import JobPlanner, Offer, Price, rank, ranking_notes, read_prices
from raymoe.plan.search import find_plan
from raymoe.plan.work import ModelWork
from raymoe.specs.hardware import HARDWARE_INSTANCES, hardware_preset
from raymoe.specs.model import ModelSpec
from raymoe.specs.workload import Workload
from tests.unit.cli.test_plan import CONFIG, JOB, WORKLOAD, words

RESIDENT = ("--schedule", "resident")  # planned faster
LARGE = CONFIG | {"num_hidden_layers": 20}  # 55 GB: an instance with 16 GiB is too small


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LARGE))
    return str(tmp_path)


def prices_in(tmp_path: Path, prices: object) -> tuple[str, str]:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(prices))
    return "--prices", str(path)


def test_the_cheapest_token_comes_first_and_what_does_not_fit_last(tmp_path: Path) -> None:
    (_, path) = prices_in(tmp_path, {"g6.xlarge": 0.8, "g4dn.8xlarge": 90.0, "g5.8xlarge": 1.6})
    spec = ModelSpec.from_config(LARGE)
    planner = JobPlanner(spec, WORKLOAD)
    offers = rank(read_prices(Path(path)).prices, planner)
    assert [offer.name for offer in offers] == ["g5.8xlarge", "g4dn.8xlarge", "g6.xlarge"]
    best, t4, _ = (offer.to_json() for offer in offers)
    assert "of host memory" in offers[-1].problem
    plan = find_plan(spec, HARDWARE_INSTANCES["g5.8xlarge"], WORKLOAD)
    assert best["tokens_per_s"] == pytest.approx(plan.tokens_per_s)
    cost = plan.cost_per_million_tokens(1.6)
    assert best["cost_per_million_tokens"] == pytest.approx(cost)
    file = io.StringIO()
    Console(file=file, width=80).print(ranking_table(offers))
    assert max(map(len, file.getvalue().splitlines())) <= 80
    text = words(file.getvalue())
    assert f"g5.8xlarge 1.60 {plan.tokens_per_s:,.0f} {cost:.2f}" in text
    rate = t4["tokens_per_s"]
    assert f"g4dn.8xlarge 90.00 {rate:,.0f} 0.34-0.55" in text
    assert "g6.xlarge 0.80 - - - - - too small" in text
    notes = " ".join(ranking_notes(planner, offers))
    assert "No products of bfloat16: g4dn.8xlarge compute in float16." in notes


def test_a_ranking_is_readable_with_80_columns() -> None:
    """Large jobs on thousands of nodes: no number is cut."""
    plan = find_plan(
        ModelSpec.from_config(LARGE), hardware_preset("a100"),
        replace(WORKLOAD, num_rows=10**9), schedule="resident",
    )  # fmt: skip
    plan = replace(plan, hardware=hardware_preset("t4"))
    offer = Offer(name="a2-ultragpu-1g", price=Price(10.98, 4.27), plan=plan, num_nodes=1234)
    file = io.StringIO()
    Console(file=file, width=80).print(ranking_table([offer]))
    assert "\u2026" not in file.getvalue()
    assert f"{1234 * plan.tokens_per_s:,.0f}" in file.getvalue()


def ranked(
    capsys: pytest.CaptureFixture[str], model: str, *arguments: str
) -> tuple[list[dict[str, Any]], list[str]]:
    assert run(["plan", "--model", model, *JOB, *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return found["offers"], found["notes"]


def test_spot_prices_are_beside_on_demand_and_own_files_name_their_date(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = tmp_path / "node.json"
    HARDWARE_INSTANCES["a2-ultragpu-1g"].to_file(node)
    content = {
        "date": "2031-02",
        "source": "our contract",
        "instances": {"a2-ultragpu-1g": {"on_demand": 3.0, "spot": 1.0}, "h100": 2.0, str(node): 9},
    }
    prices = (*prices_in(tmp_path, content), *RESIDENT)
    offers, _ = ranked(capsys, model, *prices)
    by_name = {offer["node"]: offer for offer in offers}
    assert set(by_name) == {"a2-ultragpu-1g", "h100", str(node)}, "presets and files have prices"
    priced = by_name["a2-ultragpu-1g"]
    ratio = priced["cost_per_million_tokens"] / priced["spot_cost_per_million_tokens"]
    assert ratio == pytest.approx(3)
    assert by_name["h100"]["spot_cost_per_million_tokens"] is None
    assert by_name[str(node)]["tokens_per_s"] == pytest.approx(priced["tokens_per_s"])
    assert run(["plan", "--model", model, *JOB, *prices]) == 0
    assert "Prices: our contract (2031-02)." in words(capsys.readouterr().out)


@pytest.mark.slow
def test_several_nodes_share_the_rows(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = ("--num-rows", "4000", *prices_in(tmp_path, {"a100": 1.6}), *RESIDENT)
    (one,), _ = ranked(capsys, model, *job)
    (four,), _ = ranked(capsys, model, *job, "--nodes", "4")

    def of(num_nodes: int) -> Plan:
        return find_plan(
            ModelSpec.from_config(LARGE), hardware_preset("a100"),
            replace(WORKLOAD, num_rows=-(-4_000 // num_nodes)), schedule="resident",
        )  # fmt: skip

    assert four["seconds"] == pytest.approx(of(4).job.seconds)
    assert four["tokens_per_s"] == pytest.approx(4 * of(4).tokens_per_s)
    assert four["cost"] == pytest.approx(4 * 1.6 * of(4).job.seconds / 3600)
    hours = one["seconds"] / 3600 / 2.5
    (timed,), _ = ranked(capsys, model, *job, "--deadline-hours", str(hours))
    assert timed["seconds"] <= 3600 * hours
    assert of(timed["num_nodes"] - 1).job.seconds > 3600 * hours, "with one node less it is late"
    assert run(["plan", "--model", model, *job, "--nodes", "2", "--deadline-hours", "1"]) == 2
    assert "leave out --nodes" in words(capsys.readouterr().err)
    (late,), _ = ranked(capsys, model, *job, "--deadline-hours", "0.001", "--gen-len", "1000")
    assert "one row takes" in late["problem"]


def test_what_fits_the_gpu_is_said_and_else_how_many_hold_it(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 layers are 55 GB: one A100 holds them, of A10s with 22.5 GiB it takes three or more."""
    offers, notes = ranked(capsys, model, *prices_in(tmp_path, {"a100": 5.0}))
    assert offers[0]["schedule"] == "resident"
    assert any("do not offload" in note for note in notes)
    assert not any("pipeline" in note for note in notes)
    offers, notes = ranked(capsys, model, *prices_in(tmp_path, {"g5.8xlarge": 1.6}))
    (note,) = (note for note in notes if "pipeline" in note)
    count = int(note.split(" x ")[0])
    assert 3 <= count <= 6
    found = re.search(r"about ([\d,]+) tokens/s, ([\d.]+) times", note)
    assert found is not None
    rate = int(found[1].replace(",", ""))
    assert float(found[2]) == pytest.approx(rate / count / offers[0]["tokens_per_s"], abs=0.051)
    offers, notes = ranked(capsys, model, *prices_in(tmp_path, {"g5.xlarge": 1.0}))
    assert "problem" in offers[0]
    assert any("hold the model in a pipeline" in note for note in notes), "where no node fits"


@pytest.mark.parametrize("lengths", [(64, 8), (8, 200)])
def test_a_pipeline_is_within_the_bounds_of_its_stages(lengths: tuple[int, int]) -> None:
    """A stage has 1/k of the operations, and computes with a k-th of the rows that it holds."""
    model, node = ModelSpec.from_config(LARGE), HARDWARE_INSTANCES["g5.8xlarge"]
    workload = Workload(num_rows=100_000, prompt_tokens=lengths[0], generated_tokens=lengths[1])
    pipeline = JobPlanner(model, workload).pipeline(node)
    assert pipeline is not None
    count = pipeline.num_gpus
    tokens = workload.context_tokens / workload.generated_tokens  # computed for each generated
    flop = tokens * ModelWork.of(model, 2).token_flop
    assert 0.1 < pipeline.tokens_per_s * flop / (count * node.gpu_flop_per_s) < 1
    stage = replace(model, layers=model.layers[: -(-len(model.layers) // count)])
    alone = find_plan(stage, node, workload, schedule="resident")
    assert alone.tokens_per_s / count < pipeline.tokens_per_s <= 1.001 * alone.tokens_per_s
    if lengths[1] > lengths[0]:
        assert pipeline.tokens_per_s < 0.9 * alone.tokens_per_s, "weights are read for fewer rows"


def test_a_card_that_only_the_longest_row_keeps_from_holding_the_model_is_named() -> None:
    """20 layers are 55 GB, a row of 300,000 tokens 25 GB: 79.6 GiB hold either with little else."""
    model = replace(ModelSpec.from_config(LARGE), max_model_len=400_000)
    node = hardware_preset("h100")
    planner = JobPlanner(model, WORKLOAD)
    plan = planner(node)
    assert plan.schedule != "resident"
    (note,) = planner.fit_notes(node, plan)
    assert "a row of 400,000 tokens: give the longest row with --max-context" in note
    short = replace(planner, max_model_len=4096)
    assert not [*short.fit_notes(node, short(node))]
    assert short(node).schedule == "resident"


def test_a_model_that_overflows_is_not_offered_without_bfloat16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offers, _ = ranked(capsys, "gpt-oss-20b", *prices_in(tmp_path, {"g4dn.8xlarge": 2.2}))
    assert "overflows in float16" in offers[0]["problem"]


@pytest.mark.parametrize(
    ("prices", "problem"),
    [
        ({"g9.xlarge": 1.0}, "'g9.xlarge'"),
        ({"g6.xlarge": "much"}, "has the price 'much'"),
        ({"g6.xlarge": True}, "has the price True"),
        ({"g6.xlarge": {"on_demand": 1.0, "spot": -1}}, "has the price -1"),
        ({"g6.xlarge": {"spot": 1.0}}, "has the price None"),
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
    assert "--host-memory, --what-if needs one node" in words(capsys.readouterr().err)
    assert run(["plan", "--model", model, "--hardware", "l4", "--prices", "x.json"]) == 2
    assert "--prices is for ranking instances" in words(capsys.readouterr().err)


def test_every_price_of_the_package_is_of_an_instance_with_one_gpu() -> None:
    prices = read_prices()
    assert prices.date
    assert "not checked" in prices.source
    for name, price in prices.prices.items():
        assert "(1 x " in HARDWARE_INSTANCES[name].name
        assert price.spot is None or price.spot < price.on_demand
