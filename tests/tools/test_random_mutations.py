"""tools/random_mutations.py: each mutation changes one place, is valid Python, and differs from the original."""

import ast
from pathlib import Path

import pytest

from tools import random_mutations
from tools.random_mutations import RandomMutation

FILES = ["framework/learner/decisions.py", "framework/plan/memory_budget.py", "framework/schedules/layer_vjp.py"]


@pytest.mark.parametrize("file", FILES)
def test_every_change_is_another_program(file: str, tmp_path: Path):
    source = (random_mutations.ROOT / file).read_text()
    copy = tmp_path / file
    copy.parent.mkdir(parents=True)
    mutations = random_mutations.list_mutations(file)
    assert len(mutations) >= 5
    for mutation in mutations:
        copy.write_text(source)
        random_mutations.apply(mutation, tmp_path)
        changed = copy.read_text()
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutation


def test_operators_constants_conditions_and_statements_change():
    kinds = {mutation.kind for file in FILES for mutation in random_mutations.list_mutations(file)}
    assert {"condition turned", "statement dropped", "another Compare", "another BinOp", "another Constant"} <= kinds


def test_missing_text_is_reported(tmp_path: Path):
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"a\.py:1 has no '2'"):
        random_mutations.apply(RandomMutation("a.py", 1, 4, "another Constant", "2", "3"), tmp_path)
