"""Ranking cloud instances by what a job costs on them, for `raymoe plan` without a node."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raymoe.errors import ConfigError, InfeasiblePlanError
from raymoe.plan.plan import Plan
from raymoe.specs.hardware import HARDWARE_INSTANCES, HardwareSpec

# US dollars an hour of instances with one GPU, not checked against the providers since.
PRICES_DATE = "2025, on demand, us-east-1 and us-central1"
PRICES: Mapping[str, float] = {
    "g4dn.4xlarge": 1.204, "g4dn.8xlarge": 2.176, "g4dn.16xlarge": 4.352,
    "g5.4xlarge": 1.624, "g5.8xlarge": 2.448, "g5.16xlarge": 4.096,
    "g6.4xlarge": 1.3232, "g6.8xlarge": 2.0144, "g6.16xlarge": 3.3968,
    "g6e.4xlarge": 3.00424, "g6e.8xlarge": 4.52856, "g6e.16xlarge": 7.57719,
    "g2-standard-16": 1.1472, "g2-standard-32": 1.7344,
    "a2-ultragpu-1g": 5.0688,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An instance, and its plan or why there is none."""

    name: str
    price_per_hour: float
    plan: Plan | None = None
    problem: str = ""

    @property
    def cost_per_million(self) -> float:
        assert self.plan is not None, "an instance that cannot run the job has no cost"
        return self.plan.cost_per_million_tokens(self.price_per_hour)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"node": self.name, "price_per_hour": self.price_per_hour}
        if self.plan is None:
            return found | {"problem": self.problem}
        return found | {
            "cost_per_million_tokens": self.cost_per_million,
            "cost": self.price_per_hour * self.plan.job.seconds / 3600,
            "tokens_per_s": self.plan.tokens_per_s,
            "seconds": self.plan.job.seconds,
            "schedule": self.plan.schedule,
            "bound": str(self.plan.bound),
        }


def read_prices(path: Path | None) -> Mapping[str, float]:
    """Read US dollars an hour by instance; ConfigError for unknown instances and bad prices."""
    if path is None:
        return PRICES
    try:
        prices = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prices {path}: cannot be read: {error}") from error
    if not isinstance(prices, dict) or not prices:
        raise ConfigError(f'--prices {path}: takes an object such as {{"g6.8xlarge": 2.01}}')
    for name, price in prices.items():
        if name not in HARDWARE_INSTANCES:
            raise ConfigError(
                f"--prices {path}: {name!r} is no known instance; "
                "raymoe models --hardware lists them"
            )
        if type(price) not in {int, float} or not price > 0:
            raise ConfigError(f"--prices {path}: {name} has the price {price!r}; it takes a number")
    return {name: float(price) for name, price in prices.items()}


def rank(
    prices: Iterable[tuple[str, float]], plan_on: Callable[[HardwareSpec], Plan]
) -> list[Offer]:
    """Plan the job for each instance: the cheapest for a token first, those that fail last."""
    offers = []
    for name, price in prices:
        try:
            plan = plan_on(HARDWARE_INSTANCES[name])
            offers.append(Offer(name=name, price_per_hour=price, plan=plan))
        except InfeasiblePlanError as error:
            problem = str(error).splitlines()[0].rstrip(":")
            offers.append(Offer(name=name, price_per_hour=price, problem=problem))
    feasible = sorted(
        (each for each in offers if each.plan), key=lambda each: each.cost_per_million
    )
    return feasible + [each for each in offers if each.plan is None]
