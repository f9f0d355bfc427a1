"""The section on a GPU is current, and is written from the figures of the benchmark."""

from __future__ import annotations

import json
from typing import Any

from gpu_page import BEGIN, END, PAGE, RESULTS, UNMEASURED, number, section, with_section

TIMES = {"best": 0.0123, "median": 0.02, "count": 9}
BITS = {"same bits": True, "largest difference": 0.0}
OTHER_BITS = {"same bits": False, "largest difference": 1.5e-7}


def rounds(ratio: float) -> dict[str, Any]:
    return {
        "state": "measured",
        "why": "",
        "seconds": 60.0,
        "figures": {
            "peak_mb": {"fedgist": 1234.5, "bare": 8.25},
            "seconds": {"fedgist": TIMES, "bare": {**TIMES, "best": 0.05}},
            "ratio": ratio,
            "median_ratio": 3.5,
        },
    }


REPORT: dict[str, Any] = {
    "quick": False,
    "machine": {"gpu": "A card", "torch": "2.11.0", "cuda": "13.0"},
    "parts": {
        "W1": rounds(4.065),
        "W2": {"state": "failed", "why": "OutOfMemoryError: a | b", "seconds": 1.0, "figures": {}},
        "W3": rounds(2.0),
        "laws": {
            "state": "measured",
            "why": "",
            "figures": {
                "laws": {"1": "1 stacked and one by one agree", "7": "7 the seed decides"},
                "methods": {
                    "fedavg": {"1": "pass", "7": "pass"},
                    "fedlog": {
                        "1": "pass",
                        "7": "FedLog breaks law 7",
                        "7, deterministic algorithms": "pass",
                    },
                },
            },
        },
        "resume": {
            "state": "measured",
            "why": "",
            "figures": {"fedavg": {"rounds": 6, "resumed": BITS, "run again": OTHER_BITS}},
        },
        "autocast": {
            "state": "measured",
            "why": "",
            "figures": {
                "W2": {
                    "seconds": {"float32": TIMES, "bfloat16": TIMES},
                    "ratio": 1.0,
                    "loss": {"float32": 0.5, "bfloat16": 0.51},
                    "peak_mb": {"float32": 10.0, "bfloat16": None},
                }
            },
        },
        "synchronizations": {
            "state": "not measured",
            "why": "no time left",
            "figures": {
                "W1": {
                    "count": 30,
                    "steps": 6,
                    "lines": [{"line": "a.py:7", "code": "x | y", "count": 30}],
                }
            },
        },
    },
}


def test_the_section_on_a_gpu_is_current() -> None:
    page = PAGE.read_text("utf-8")
    report = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else None
    assert page.count(BEGIN) == 1
    assert with_section(page, report) == page, "run: python docs/scripts/gpu_page.py"


def test_without_figures_it_says_so_with_the_command() -> None:
    page = with_section(f"before\n{BEGIN}old\n{END}\nafter\n", None)
    assert page == f"before\n{BEGIN}\n{UNMEASURED}\n{END}\nafter\n"
    assert "The command is `python bench/gpu.py`" in UNMEASURED


def test_figures_become_tables() -> None:
    text = section(REPORT)
    for line in (
        "Measured on A card with torch 2.11.0 and CUDA 13.0.",
        "|  | W1 | W3 |",
        "| fedgist | 0.0123 (0.02) | 0.0123 (0.02) |",
        "| **ratio** | **4.07** (3.5) | **2** (3.5) |",
        "| memory, MB: fedgist | 1,234 | 1,234 |",
        "| 7 the seed decides | 1 of 2 |",
        "| `fedlog` | 7 | FedLog breaks law 7 |",
        "| `fedlog` | 7, deterministic algorithms | pass |",
        "| fedavg | resumed | yes | 0 |",
        "| fedavg | run again | no | 1.5e-07 |",
        "| W2 | 0.0123 (0.02) | 0.0123 (0.02) | 1 | 0.5000 | 0.5100 | 10 | - |",
        "| W1 | 6 | 30 |",
        "| W1 | `a.py:7` | `x \\| y` | 30 |",
        "| W2 | failed | OutOfMemoryError: a \\| b |",
        "| synchronizations | not measured | no time left |",
    ):
        assert line in text.splitlines(), line


def test_tiny_sizes_are_said_to_be_no_measurement() -> None:
    text = section({"quick": True, "machine": {"torch": "2.11.0"}, "parts": {}})
    assert (
        "Measured on a CPU with torch 2.11.0, in tiny sizes that say nothing about speed." in text
    )


def test_numbers_have_three_figures() -> None:
    assert [number(x) for x in (None, 0.00123456, 12.34, 1234.5)] == [
        "-",
        "0.00123",
        "12.3",
        "1,234",
    ]
