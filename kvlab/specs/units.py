"""Token counts and byte counts as people write them. k is 1,024 tokens; GB is 10**9, GiB is 2**30."""

from __future__ import annotations

import re

_TOKENS = {"": 1, "k": 1024, "m": 1024**2}
_BYTES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip

# commas only between groups of three digits: "1,5k" is not 15k
_NUMBER = r"\s*(?=[\d.])((?:\d{1,3}(?:,\d{3})+|\d[\d_]*)?(?:\.\d+)?)"


def parse_tokens(text: str | int, name: str = "tokens") -> int:
    """The number of tokens `text` names: "32k" is 32,768, "1M" is 1,048,576, "4096" is 4,096.

    `name` is what an error calls it.

    Raises:
        ValueError: not a positive whole number of tokens.
    """
    return _parse(
        str(text), _TOKENS, (name, "tokens"), 'a whole number, or one with k (1,024) or M (1,048,576), as in "32k"'
    )


def parse_bytes(text: str | int, name: str = "bytes") -> int:
    """The number of bytes `text` names: "2GiB" is 2,147,483,648, "2GB" is 2,000,000,000.

    `name` is what an error calls it.

    Raises:
        ValueError: not a positive whole number of bytes.
    """
    return _parse(str(text), _BYTES, (name, "bytes"), 'a number with B, kB, MB, GB, KiB, MiB or GiB, as in "2GiB"')


def _parse(text: str, units: dict[str, int], names: tuple[str, str], rule: str) -> int:
    name, what = names
    match = re.fullmatch(_NUMBER + r"\s*([a-zA-Z]*)\s*", text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in units:
        raise ValueError(f"{name} {text!r}: must be {rule}")
    number = match.group(1).replace(",", "").replace("_", "")
    whole, _, fraction = number.partition(".")
    value, rest = divmod(int((whole or "0") + fraction) * units[unit], 10 ** len(fraction))
    if rest or value <= 0:
        raise ValueError(f"{name} {text!r}: must be a positive whole number of {what}")
    return value


def gib(n_bytes: int) -> str:
    """`n_bytes` in GiB (2**30), for people."""
    return f"{n_bytes / 2**30:,.2f} GiB"


def gb(n_bytes: int) -> str:
    """`n_bytes` in GB (10**9), for people."""
    return f"{n_bytes / 10**9:,.2f} GB"


def human_bytes(n_bytes: int) -> str:
    """`n_bytes` in the largest binary unit that leaves a number of at least 1: "320.00 KiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(n_bytes) >= size:
            return f"{n_bytes / size:,.2f} {unit}"
    return f"{n_bytes:,} B"
