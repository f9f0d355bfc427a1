"""Ways to spoil what was valid: bytes, texts, and the values inside a JSON or TOML document."""

from __future__ import annotations

import copy
import math
from random import Random
from typing import Any

# what people and programs put where something else is expected
NASTY: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 10**30, -(10**30), 2**31, 2**63, 0.0, 0.5, -0.5, 1.5, 1e308, 1e-320),
    *(math.nan, math.inf, -math.inf, True, False),
    *("", " ", "0", "12", "nan", "true", "auto", "each", "no such thing", "a:b", "json:loads", "/"),
    *(
        "..",
        "$a_$",
        "[/red]",
        "\x1b[31m",
        "a\nb",
        "\0",
        "\ud7ff\u202e",
        "é",
        "x" * 5000,
        "{}",
        "%s",
    ),
    *([], [[]], [1], ["a", "a"], [1, "a"], {}, {"a": 1}, {"": {}}, {"name": "local"}, [{}]),
)
SMALL = 1e5  # more than this is more training than a case should do, and no mistake


def nasty(random: Random) -> Any:
    return copy.deepcopy(random.choice(NASTY))


def spoil_bytes(random: Random, data: bytes) -> bytes:
    """Flip, overwrite, cut, repeat, insert: one to three times."""
    spoilt = bytearray(data)
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(spoilt) + 1)
        end = min(len(spoilt), at + random.choice((1, 2, 4, 8, 100)))
        match random.randrange(7):
            case 0 if at < len(spoilt):
                spoilt[at] ^= 1 << random.randrange(8)
            case 1:
                spoilt[at:end] = random.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * (end - at)
            case 2:
                del spoilt[at:end]
            case 3:
                del spoilt[at:]
            case 4:
                spoilt[at:at] = spoilt[at:end] * random.choice((1, 2, 50))
            case 5:
                spoilt[at:at] = random.randbytes(random.choice((1, 4, 30)))
            case _:  # a number of some header
                wide = random.choice((2, 4, 8))
                value = random.choice((0, 1, 2 ** (8 * wide) - 1, 2 ** (8 * wide - 1), 10**4))
                order = random.choice(("little", "big"))
                spoilt[at : at + wide] = value.to_bytes(wide, order)  # type: ignore[arg-type]
    return bytes(spoilt)


def spoil_lines(random: Random, text: str) -> str:
    """Drop, repeat, swap, cut or replace whole lines."""
    lines = text.splitlines(keepends=True) or [""]
    at, other = random.randrange(len(lines)), random.randrange(len(lines))
    match random.randrange(6):
        case 0:
            del lines[at]
        case 1:
            lines.insert(other, lines[at])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case 3:
            lines[at] = lines[at][: random.randrange(len(lines[at]) + 1)]
        case 4:
            lines[at] = random.choice(("{}\n", "null\n", "[]\n", "\n", "1e999\n", "{" * 5000))
        case _:
            return spoil_bytes(random, text.encode()).decode("utf-8", random.choice(MODES))
    return "".join(lines)


MODES = ("replace", "ignore", "surrogateescape")


def spoil_tree(random: Random, value: Any) -> Any:
    """Replace, drop, rename or move something at any depth of a document."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        spoilt, key = dict(value), random.choice(list(value))
        match random.randrange(8):
            case 0:
                del spoilt[key]
            case 1:
                spoilt[random.choice((key + "x", key[:-1], key.upper(), "", "a.b"))] = spoilt[key]
            case 2:
                spoilt[key] = copy.deepcopy(value[random.choice(list(value))])
            case _:
                spoilt[key] = spoil_tree(random, value[key])
        return spoilt
    if isinstance(value, list) and value and random.random() < 0.7:
        items, at = list(value), random.randrange(len(value))
        match random.randrange(4):
            case 0:
                del items[at]
            case 1:
                items.append(copy.deepcopy(items[at]))
            case _:
                items[at] = spoil_tree(random, items[at])
        return items
    if isinstance(value, int | float) and not isinstance(value, bool) and random.random() < 0.5:
        return random.choice((value + 1, value - 1, -value, value * 10, float(value), str(value)))
    return nasty(random)
