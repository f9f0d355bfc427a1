"""What secure sums cost: seconds of all sites and the server in one process, bytes of a site.

    python bench/bench.py --only secure
    python bench/secure.py SITES NUMBERS LOST

The cases are 50 sites with 12,500 numbers (50 kB as float32) each, none and 16 of them lost after
they had shared, and 3 sites with 2,500,000 (10 MB). ``keys`` are the first two steps, which do not
depend on the numbers. ``facts`` are the sums of one site before training: means, deviations and
histograms of 30 numbers, and their correlations. Each figure is the least of all repeats.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedgist.core.message import payload_bytes
from fedgist.data.dataset import Dataset
from fedgist.wire.secure.group import Group
from fedgist.wire.secure.local_keys import LocalCredentials
from fedgist.wire.secure.member import Member
from fedgist.wire.secure.notes import Confirmations, Keys, Opened, Sealed
from fedgist.wire.secure.occasion import Occasion
from fedgist.world.facts.question import Filling, Plan, Question
from fedgist.world.facts.rows import rows_of
from fedgist.world.facts.sums import facts_sums

SECURE_LIMITS = {
    "secure: 50 sites, 50 kB, 0 lost, beside keys": 1.0,
    "secure: 3 sites, 10000 kB, 0 lost, beside keys": 3.0,
}
ROWS, NUMBERS = 100_000, 30
CASES = ((50, 12_500, 0), (50, 12_500, 16), (3, 2_500_000, 0))


def measured(sites: int, numbers: int, lost: int) -> dict[str, float]:
    """Return the seconds of the steps of one total, and the bytes that a site sends beside it."""
    keys = {n: Ed25519PrivateKey.generate() for n in range(sites)}
    public = {n: key.public_key() for n, key in keys.items()}
    occasion = Occasion("bench", 1, "train", 1, "mlp", "")
    members = {n: Member(n, occasion, LocalCredentials(keys[n], public), 3) for n in range(sites)}
    values = np.random.default_rng(0).integers(0, 2**40, numbers, dtype=np.uint64)
    group, seconds = Group(occasion, numbers), dict[str, float]()

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began

    with timed("keys"):
        group.advertised = {n: member.advertise() for n, member in members.items()}
        everyone = [*group.advertised.values()]
        group.sealed = {n: member.share(everyone) for n, member in members.items()}
    there = range(lost, sites)
    with timed("mask"):
        for n in there:
            group.add_masked(n, members[n].mask(group.shares_for(n), values))
    with timed("open"):
        confirmed = {n: members[n].confirm(frozenset(there)) for n in there}
        answers = {n: members[n].unmask(confirmed) for n in there}
    with timed("total"):
        total = group.total(answers)
    assert np.array_equal(total, values * np.uint64(len(there)))
    last = sites - 1
    sent = [Keys.of([group.advertised[last]]), Sealed.of(group.sealed[last])]
    sent += [Confirmations.of({last: confirmed[last]}), Opened.of(answers[last])]
    return seconds | {"bytes beside 8 a number": sum(payload_bytes(note) for note in sent)}


def facts_measured() -> dict[str, float]:
    """Return the seconds of a site's sums of facts, and their bytes."""
    x = torch.randn(ROWS, NUMBERS, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(ROWS, dtype=torch.int64)
    data = Dataset("rows", x, y, x[:0], y[:0], 1, classes=("a",))
    edges = [float(edge) for edge in range(-3, 4)]
    about = {"centre": 0.0, "unit": 1.0, "edges": edges}
    found = dict[str, float]()
    for name, further in (("", False), (" and correlations", True)):
        question = Question.model_validate(
            {"classes": ["a"], "input_shape": [NUMBERS], "inputs": about, "correlations": further}
        )
        plan, began = Plan(question, Filling()), time.perf_counter()
        sums = facts_sums(plan, rows_of(plan, data, torch.arange(ROWS)))
        case = f"facts: {ROWS:,} rows, {NUMBERS} numbers{name}"
        found[case] = time.perf_counter() - began
        found[f"{case}, bytes"] = payload_bytes(sums)
    return found


def secure(repeats: int) -> dict[str, float]:
    """Measure the cases of this module."""
    figures: dict[str, float] = {}
    for sites, numbers, lost in CASES:
        found = [measured(sites, numbers, lost) for _ in range(repeats)]
        least = {key: min(one[key] for one in found) for key in found[0]}
        case = f"secure: {sites} sites, {4 * numbers / 1000:g} kB, {lost} lost"
        figures |= {f"{case}, {key}": value for key, value in least.items()}
        figures[f"{case}, beside keys"] = sum(least[step] for step in ("mask", "open", "total"))
    facts = [facts_measured() for _ in range(repeats)]
    return figures | {key: min(one[key] for one in facts) for key in facts[0]}


def main() -> None:
    """Print a line for the case of the command line."""
    sites, numbers, lost = (int(word) for word in sys.argv[1:])
    print(", ".join(f"{k} {v:.3g}" for k, v in measured(sites, numbers, lost).items()))


if __name__ == "__main__":
    main()
