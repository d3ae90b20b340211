"""Checks of options that several commands have."""

import typer

from raymoe.config import AUTO, NumActors
from raymoe.errors import ConfigError
from raymoe.plan.rank import MAX_PRICE

MAX_CURRENCY = 8  # letters


def check_number(option: str, value: float | None, bounds: tuple[float, float], unit: str) -> None:
    """Refuse a value outside of its bounds; None was not given."""
    low, high = bounds
    if value is not None and not low <= value <= high:  # nor what is not a number
        raise ConfigError(f"{option} is {value:g}; it takes {low:g} to {high:,.0f} {unit}")


def check_money(price_per_hour: float | None, currency: str) -> None:
    """Refuse a price or the name of a currency that cannot be.

    Raises:
        ConfigError: Which option, and what it takes.
    """
    check_number("--price-per-hour", price_per_hour, (0.0, MAX_PRICE), currency)
    if not 1 <= len(currency) <= MAX_CURRENCY or not currency.isprintable():
        raise ConfigError(f"--currency is {currency!r:.40}; it takes a name, such as EUR")


def num_actors_or_auto(text: str) -> NumActors:
    """Read a number of engines, for typer."""
    if text == AUTO:
        return AUTO
    if not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r:.40} is neither a whole number from 1 nor {AUTO}")
    return int(text)
