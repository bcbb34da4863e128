"""The expression evaluator against the vectors that every evaluator must agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clover_compile.runtime.expressions import BadExpression, evaluate, names

VECTORS = json.loads((Path(__file__).parent / "vectors" / "expressions.json").read_text())


@pytest.mark.parametrize("vector", VECTORS, ids=lambda v: v["expression"] or "empty")
def test_vector(vector: dict[str, Any]) -> None:
    if vector.get("error"):
        with pytest.raises(BadExpression):
            evaluate(vector["expression"], vector["names"])
    else:
        assert evaluate(vector["expression"], vector["names"]) == vector["value"]


def test_names() -> None:
    assert names("cdiv(n, 16) * max(R, 1) <= T") == {"n", "R", "T"}
