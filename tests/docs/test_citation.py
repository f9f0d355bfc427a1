"""CITATION.cff is valid, and says what pyproject.toml says.

The schema is the format's own, https://citation-file-format.github.io, CC BY 4.0.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((Path(__file__).parent / "cff-1.2.0.json").read_text("utf-8"))
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))


def test_it_is_valid() -> None:
    jsonschema.validate(CITATION, SCHEMA)


def test_the_schema_refuses_what_is_none() -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**CITATION, "type": "poem"}, SCHEMA)


def test_it_says_what_the_package_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert CITATION["version"] == project["version"]
    assert CITATION["license"] == project["license"]
    assert [a["name"] for a in CITATION["authors"]] == [a["name"] for a in project["authors"]]
    assert CITATION["title"] == f"{project['name']}: {project['description'].lower()}"


def test_it_names_the_paper() -> None:
    (paper,) = CITATION["references"]
    page = (ROOT / "docs" / "methods" / "fedlog.md").read_text("utf-8")
    assert paper["title"] in " ".join(page.split())
    assert all(author["family-names"] in page for author in paper["authors"])
