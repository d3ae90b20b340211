"""What does the demo model do? Messy strings to canonical ones, with checkable answers.

Conventions that make every prompt determine its answer:

- date: ISO 8601. Dotted numbers are day first (``3.12.2024``), all others name the month or put
  the year first. Years lie in 1950..2049, which settles ``'24``. The time of day is dropped.
- phone: E.164. ``00`` and ``+`` introduce a country code; ten digits without one, and eleven
  that start with 1, are a North American number. A trunk ``(0)`` and an extension are dropped.
- amount: two decimals and an ISO 4217 code. A separator before one or two closing digits is the
  decimal one; ``k`` means thousand, ``M`` means million, and a closing ``.-`` no cents.
- name: ``Last, First``. Honorifics, middle initials and suffixes are dropped.
- unit: grams, millimetres or millilitres, without trailing zeros. A comma is a decimal one.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, timedelta
from decimal import Decimal
from random import Random

TRAINING_SEED_START = 1_000_000_000
"""Training uses seeds from here on; evaluations and demos use seeds below 1_000_000."""

HELD_OUT_MODULUS = 50
"""One prompt in this many is never used in training, whatever the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WranglingRow:
    """One task: the model completes ``prompt`` with ``answer`` and the end-of-sequence token."""

    kind: str
    prompt: str
    answer: str


def make_rows(num_rows: int, *, seed: int, held_out: bool = False) -> Iterator[WranglingRow]:
    """Yield random rows; the kinds take turns, and equal arguments give equal rows.

    Args:
        seed: Below 1_000_000 for evaluation, from ``TRAINING_SEED_START`` for training.
        held_out: Yield only prompts that training never sees, instead of only those it may see.
    """
    rng = Random(seed)
    for index in range(num_rows):
        kind = KINDS[index % len(KINDS)]
        row = _make_row(kind, rng)
        while is_held_out(row.prompt) != held_out:
            row = _make_row(kind, rng)
        yield row


def is_held_out(prompt: str) -> bool:
    """Say whether a prompt is kept from training; depends on its text only."""
    return zlib.crc32(prompt.encode()) % HELD_OUT_MODULUS == 0


def _make_row(kind: str, rng: Random) -> WranglingRow:
    text, answer = _MAKERS[kind](rng)
    return WranglingRow(kind=kind, prompt=f"{kind}: {_add_spaces(rng, text)} ->", answer=answer)


def _add_spaces(rng: Random, text: str) -> str:
    choice = rng.random()
    if choice < 0.1:
        return text.replace(" ", "  ", 1)
    if choice < 0.15:
        return f" {text}"
    if choice < 0.2:
        return f"{text} "
    return text


def _change_case(rng: Random, text: str) -> str:
    choice = rng.random()
    if choice < 0.2:
        return text.upper()
    return text.lower() if choice < 0.45 else text


_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_DATE_PREFIXES = ("on", "due", "born", "since", "dated", "as of")
_FIRST_DAY = date(1950, 1, 1)
_NUM_DAYS = (date(2050, 1, 1) - _FIRST_DAY).days


def _make_date(rng: Random) -> tuple[str, str]:
    day = _FIRST_DAY + timedelta(days=rng.randrange(_NUM_DAYS))
    text = _numeric_date(rng, day) if rng.random() < 0.4 else _worded_date(rng, day)
    return text, day.isoformat()


def _numeric_date(rng: Random, day: date) -> str:
    y, m, d = day.year, day.month, day.day
    hour, minute = rng.randrange(24), rng.randrange(60)
    return rng.choice(
        (
            f"{y}/{m}/{d}",
            f"{y}/{m:02}/{d:02}",
            f"{y}.{m:02}.{d:02}",
            f"{y}-{m}-{d}",
            f"{y} {m:02} {d:02}",
            f"{y}{m:02}{d:02}",
            f"{d}.{m}.{y}",
            f"{d:02}.{m:02}.{y}",
            f"{day.isoformat()}T{hour:02}:{minute:02}:{rng.randrange(60):02}Z",
            f"{day.isoformat()} {hour:02}:{minute:02}",
        )
    )


def _worded_date(rng: Random, day: date) -> str:
    name = _MONTHS[day.month - 1]
    month = rng.choice((name, name, name[:3], f"{name[:3]}.")) if len(name) > 3 else name
    y: int | str = day.year if rng.random() < 0.9 else f"'{day.year % 100:02}"
    d = day.day
    nth = rng.choice((f"{d}", f"{d}", f"{d}{_ordinal_suffix(d)}", f"{d:02}"))
    text = rng.choice(
        (
            f"{nth} {month} {y}",
            f"{d}{_ordinal_suffix(d)} of {month}, {y}",
            f"{month} {nth}, {y}",
            f"{month} {nth} {y}",
            f"{d:02}-{name[:3]}-{day.year}",
            f"{d}{rng.choice('-/')}{name[:3]}{rng.choice('-/')}{day.year}",
            f"{day.year} {month} {nth}",
            f"{nth}. {month} {y}" if nth.isdigit() else f"the {nth} {month} {y}",
        )
    )
    if rng.random() < 0.2:
        weekday = _WEEKDAYS[day.weekday()]
        text = f"{rng.choice((weekday, weekday[:3]))}{rng.choice((', ', ' '))}{text}"
    if rng.random() < 0.1:
        text = f"{rng.choice(_DATE_PREFIXES)} {text}"
    return _change_case(rng, text)


def _ordinal_suffix(day: int) -> str:
    if day in {11, 12, 13}:
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")


# Country code and the sizes in which its national digits are usually grouped.
_COUNTRIES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("1", (3, 3, 4)),
    ("1", (3, 3, 4)),
    ("33", (1, 2, 2, 2, 2)),
    ("34", (3, 3, 3)),
    ("44", (2, 4, 4)),
    ("49", (2, 4, 4)),
    ("55", (2, 5, 4)),
    ("61", (1, 4, 4)),
    ("81", (2, 4, 4)),
    ("91", (5, 5)),
)
_PHONE_PREFIXES = (
    "tel.", "tel:", "Tel", "TEL.", "Tel.:", "phone", "Phone:", "ph.", "mobile", "mob.", "cell",
    "call", "T:",
)  # fmt: skip


def _make_phone(rng: Random) -> tuple[str, str]:
    code, sizes = rng.choice(_COUNTRIES)
    groups = [_make_digits(rng, size, first=2 if code == "1" else 1) for size in sizes]
    separator = rng.choice((" ", "-", ".", " ", "-", ""))
    joined = separator.join(groups)
    if code == "1" and rng.random() < 0.7:
        rest = f"{groups[1]}{separator}{groups[2]}"
        text = rng.choice((joined, f"({groups[0]}) {rest}", f"({groups[0]}){rest}"))
        text = rng.choice(("", "", "", "1 ", "+1 ", "1-")) + text
    elif code != "1" and rng.random() < 0.25:
        text = f"{rng.choice(('+', '00'))}{code} (0){joined}"
    else:
        text = f"{rng.choice(('+', '+', '00'))}{code}{rng.choice((separator, ' '))}{joined}"
    if rng.random() < 0.35:
        text = f"{rng.choice(_PHONE_PREFIXES)} {text}"
    if rng.random() < 0.1:
        text = f"{text} {rng.choice(('ext.', 'x', 'ext'))} {rng.randrange(10, 1000)}"
    return text, f"+{code}{''.join(groups)}"


def _make_digits(rng: Random, size: int, *, first: int) -> str:
    return str(rng.randrange(first * 10 ** (size - 1), 10**size))


_CURRENCIES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        "USD",
        ("$", "$", "$ ", "US$", "USD ", "USD", "usd "),
        ("USD", "usd", "dollars", "$", "US dollars"),
    ),
    ("EUR", ("€", "€ ", "EUR ", "EUR", "eur "), ("EUR", "€", "euros", "Euro", "eur")),
    ("GBP", ("£", "£ ", "GBP "), ("GBP", "gbp", "pounds", "£")),
    ("JPY", ("¥", "¥ ", "JPY "), ("JPY", "yen", "Yen", "¥")),
    ("CHF", ("CHF ", "Fr. ", "chf "), ("CHF", "chf", "francs")),
    ("INR", ("Rs. ", "Rs ", "₹", "INR "), ("INR", "rupees", "inr")),
    ("CAD", ("C$", "CA$", "CAD "), ("CAD", "cad", "Canadian dollars")),
)
_AMOUNT_PREFIXES = ("total", "Total:", "price", "fee:", "due", "paid", "TOTAL", "sum of", "~")


def _make_amount(rng: Random) -> tuple[str, str]:
    code, before, after = rng.choice(_CURRENCIES)
    number, value = _make_number(rng)
    if rng.random() < 0.5:
        text = f"{rng.choice(before)}{number}"
    else:
        name = rng.choice(after)
        text = f"{number}{rng.choice((' ', ' ', '')) if len(name) < 4 else ' '}{name}"
    if rng.random() < 0.25:
        text = f"{rng.choice(_AMOUNT_PREFIXES)} {text}"
    return text, f"{value:.2f} {code}"


def _make_number(rng: Random) -> tuple[str, Decimal]:
    style = rng.random()
    if style < 0.15:
        return _write_multiple(rng)
    whole = rng.randrange(10 ** rng.randint(1, 7))
    if style < 0.4:
        shown = rng.choice((f"{whole}", f"{whole:,}", f"{whole}.-", f"{whole},-", f"{whole:,}"))
        return shown, Decimal(whole)
    if style < 0.5:
        value = whole + Decimal(rng.randrange(10)) / 10
        shown = rng.choice((f"{value:.1f}", f"{value:,.1f}", f"{value}".replace(".", ",")))
        return shown, value
    value = whole + Decimal(rng.randrange(100)) / 100
    return _write_decimal(rng, value), value


def _write_multiple(rng: Random) -> tuple[str, Decimal]:
    tenths = rng.randrange(10, 1000)
    value = Decimal(tenths) / 10
    shown = f"{value:.1f}" if tenths % 10 else f"{value:.0f}"
    if rng.random() < 0.6:
        return f"{shown}{rng.choice(('k', 'k', 'K', ' thousand'))}", value * 1000
    return f"{shown}{rng.choice(('M', 'M', 'm', ' million'))}", value * 1_000_000


def _write_decimal(rng: Random, value: Decimal) -> str:
    english = f"{value:,.2f}"
    style = rng.randrange(6)
    if style == 0:
        return english.translate(str.maketrans(",.", ".,"))
    if style == 1:
        return english.replace(",", " ")
    if style == 2:
        return english.replace(",", "'")
    if style == 3:
        return english.replace(",", "")
    return english


def _split_words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_GIVEN_NAMES = _split_words(
    "Aaron Ada Adele Ahmed Aisha Alan Alice Amara Ana Andre Anna Anton Ben Boris Carla Carlos Chen "
    "Chloe Clara Daniel David Diego Dina Elena Eli Élodie Emil Emma Erik Eva Fatima Felix Finn "
    "François Frida Gita Grace Hana Hans Hugo Ibrahim Ines Irene Isaac Ivan Jack James Jane "
    "Jean-Luc João John Jörg Jorge José Julia Kai Karim Kate Kenji Lars Laura Leo Liam Lin Lucía "
    "Luis Łukasz Mae Maria Mary-Ann Max Mei Mia Miguel Mohamed Nadia Nina Noah Noël Nora Olga "
    "Oscar Øyvind Paul Pedro Petra Priya Rahul Raj Rosa Ruth Sam Sara Sofia Tariq Tess Tom Uma "
    "Vera Victor Wei Yara Yuki Zoë"
)
_FAMILY_NAMES = _split_words(
    "Adams Ali Alvarez Anders Bauer Becker Bell Berg Brown Chen Clark Costa Cruz Davis Diaz Dubois "
    "Evans Fischer Flores García Gómez Gray Green Gupta Haas Hall Hansen Hill Ito Ivanov Jensen "
    "Jones Kaur Keller Khan Kim King Klein Kumar Larsen Lee Lewis Lopez Martin Meyer Miller Moore "
    "Moreau Mori Müller Nguyen Nielsen Novak Núñez O'Brien O'Hara O'Neill Okafor Osei Park Patel "
    "Pérez Petrov Popov Quinn Ramos Reyes Rossi Roy Russo Sato Schäfer Schmidt Silva Singh Smith "
    "Smith-Jones Sørensen Sousa Suzuki Tanaka Taylor Torres Tran Vargas Vega Walker Weber White "
    "Wolf Wong Wright Wu Yilmaz Young Zhang Ziegler"
)
_HONORIFICS = ("Mr.", "Mr", "Mrs.", "Ms.", "Ms", "Dr.", "Dr", "Prof.", "Sir", "Prof. Dr.")
_SUFFIXES = (" Jr.", ", Jr.", " Sr.", ", PhD", " PhD", ", MD", " III")
_ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "st")
_RHYMES = ("a", "e", "i", "o", "u", "an", "el", "in", "or", "us", "ai", "er", "ok", "ash", "und")
_MAX_INVENTED_CHARS = 10


def _make_name(rng: Random) -> tuple[str, str]:
    given = rng.choice(_GIVEN_NAMES) if rng.random() < 0.6 else _invent_name(rng)
    family = rng.choice(_FAMILY_NAMES) if rng.random() < 0.5 else _invent_name(rng)
    middle = f" {rng.choice('ABCDEFGHJKLMNPRSTVW')}." if rng.random() < 0.3 else ""
    if rng.random() < 0.4:
        honorific = f"{rng.choice(_HONORIFICS)} " if rng.random() < 0.15 else ""
        text = f"{family}, {honorific}{given}{middle}"
    else:
        honorific = f"{rng.choice(_HONORIFICS)} " if rng.random() < 0.4 else ""
        suffix = rng.choice(_SUFFIXES) if rng.random() < 0.2 else ""
        text = f"{honorific}{given}{middle} {family}{suffix}"
    return _change_case(rng, text), f"{family}, {given}"


def _invent_name(rng: Random) -> str:
    syllables = (rng.choice(_ONSETS) + rng.choice(_RHYMES) for _ in range(rng.randint(2, 3)))
    return "".join(syllables)[:_MAX_INVENTED_CHARS].title()


# Canonical unit, power of ten to reach it, and the names of the source unit.
_UNITS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("g", 3, ("kg", "kg", "kilo", "kilos", "kilograms", "kilogrammes", "kgs")),
    ("g", 0, ("g", "gr", "gram", "grams", "grammes")),
    ("g", -3, ("mg", "milligrams")),
    ("mm", 3, ("m", "metres", "meters", "mtr")),
    ("mm", 1, ("cm", "cm", "centimetres", "centimeters")),
    ("mm", 0, ("mm", "millimetres", "millimeters")),
    ("ml", 3, ("l", "litres", "liters", "ltr")),
    ("ml", 2, ("dl", "decilitres", "deciliters")),
    ("ml", 1, ("cl", "centilitres", "centiliters")),
    ("ml", 0, ("ml", "millilitres", "milliliters")),
)
_UNIT_PREFIXES = ("net wt", "approx.", "about", "~", "ca.", "size:", "Qty", "net", "qty:")


def _make_unit(rng: Random) -> tuple[str, str]:
    unit, shift, names = rng.choice(_UNITS)
    num_decimals = rng.choice((0, 0, 1, 1, 2, 3)) if shift >= 0 else 0
    digits = rng.randrange(1, 10 ** rng.randint(max(1, num_decimals), 4))
    value = Decimal(digits).scaleb(-num_decimals)
    name = _change_case(rng, rng.choice(names))
    shown = f"{value:f}"
    if num_decimals < 3 and rng.random() < 0.2:
        shown = shown.replace(".", ",")
    text = f"{shown}{rng.choice((' ', ' ', ''))}{name}"
    if rng.random() < 0.3:
        prefix = rng.choice(_UNIT_PREFIXES)
        text = f"{prefix}{'' if prefix == '~' else ' '}{text}"
    canonical = f"{value.scaleb(shift):f}"
    if "." in canonical:
        canonical = canonical.rstrip("0").rstrip(".")
    return text, f"{canonical} {unit}"


_MAKERS: dict[str, Callable[[Random], tuple[str, str]]] = {
    "date": _make_date,
    "phone": _make_phone,
    "amount": _make_amount,
    "name": _make_name,
    "unit": _make_unit,
}
KINDS: tuple[str, ...] = tuple(_MAKERS)
