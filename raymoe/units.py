"""Constants, formatting and parsing of sizes (binary prefixes) and times."""

import re

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
MAX_BYTES = 1 << 63
UNLIMITED_BYTES = 1 << 62  # more than any memory
MAX_INT64 = 2**63 - 1
MAX_EXACT_FLOAT = 2**53  # up to it, a float is equal to each whole number
YEAR_S = 365 * 24 * 3600

_UNITS = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": TIB}
_UNITS |= {"KB": KB, "MB": MB, "GB": GB, "TB": TB, "K": KIB, "M": MIB, "G": GIB, "T": TIB}


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def format_bytes(num_bytes: float) -> str:
    """Format a capacity with a binary prefix.

    >>> format_bytes(3 * GIB)
    '3.00 GiB'
    """
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format a duration for people.

    >>> format_seconds(3725), format_seconds(0.0125)
    ('1h02m05s', '12.5 ms')
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds > 1000 * YEAR_S:
        return "more than 1,000 years"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m{rest:02d}s" if hours else f"{minutes}m{rest:02d}s"


CURRENCY = "USD"  # of prices, unless a user names another


def format_money(amount: float, currency: str) -> str:
    """Format a cost for people.

    >>> format_money(1234.5, "USD"), format_money(0.04219, "EUR")
    ('1,234.50 USD', '0.0422 EUR')
    """
    if amount >= 1:
        return f"{amount:,.2f} {currency}"
    if 0 < amount < 1e-4:
        return f"under 0.0001 {currency}"
    return f"{amount:.3g} {currency}"


def parse_bytes(text: str) -> int:
    """Read a capacity such as "192GiB", "16 GB" or "1024"; raises ValueError.

    >>> parse_bytes("1.5GiB") == 3 * GIB // 2
    True
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write a number and a unit, such as 192GiB")
    num_bytes = float(match[1]) * _UNITS[match[2].upper()]
    if num_bytes >= MAX_BYTES:
        raise ValueError(f"{text[:40]!r} is too large for a size")
    return int(num_bytes)
