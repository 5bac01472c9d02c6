"""What `list`, `show` and `diff` print, the verbs' own list, and what is read from docstrings."""

import json
import re

import optax
import pytest

import configs
from framework.config import Config
from framework.config_docs import as_text, describe, field_docs, summary
from framework.config_text import literal
from launch import __main__ as entry
from launch import configs as verb


def run(capsys, *argv: str) -> list[str]:
    assert verb.main(list(argv)) == 0
    return capsys.readouterr().out.splitlines()


def fail(capsys, *argv: str) -> str:
    assert verb.main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_list_prints_names_and_first_lines(capsys, monkeypatch):
    def gpt() -> Config:
        """GPT-2.

        More.
        """
        raise AssertionError("listing builds no config")

    monkeypatch.setattr(configs, "functions", lambda: {"gpt2-124m": gpt, "x": gpt})
    assert run(capsys, "list") == ["gpt2-124m  GPT-2.", "x          GPT-2."]


def test_show_prints_one_line_per_leaf_with_its_doc(capsys, user_file):
    lines = run(capsys, "show", f"{user_file}:mine")
    assert lines[0] == f"{user_file}:mine: My first config."
    by_path = {line.split(" = ")[0]: line for line in lines[1:] if " = " in line}
    assert by_path["optimizer"].split() == ["optimizer", "=", "optax.adamw", "#", "what", "updates"]
    assert "# its width, from the parent" in by_path["layers.0.dim"]
    assert by_path["layers.0.dim"].split()[2] == "?"
    assert by_path["layers.1.heads"].split(maxsplit=3)[2:] == ["2", "# how many heads, over two lines"]
    assert by_path["note"] == "note = 'a b'"
    assert "One layer of it. More of that." in by_path["layers.0"]
    assert lines[-1].startswith("?: not set here.")
    assert all(len(line) < 160 for line in lines[1:-1])


def test_show_marks_rules_and_overrides(capsys, user_file):
    lines = run(
        capsys, "show", f"{user_file}:mine", "--accelerator=v5e-4", "--config.steps=7", "--config.optimizer=lion"
    )
    assert lines[1:4] == [
        "rule v5e-*: remat none -> full",
        "rule v5e-*: layers.0.heads 4 -> 8",
        "rule v5e-*: steps 10 -> 20",
    ]
    by_path = {line.split(" = ")[0]: line for line in lines[4:] if " = " in line}
    assert "full" in by_path["remat"]
    assert "<- rule v5e-*" in by_path["remat"]
    assert "<- command line" in by_path["steps"]
    assert "optax.lion" in by_path["optimizer"]
    assert "<- command line" in by_path["optimizer"]
    assert "<-" not in by_path["layers.1.heads"]


def test_show_as_json_round_trips(capsys, user_file):
    text = "\n".join(run(capsys, "show", f"--config={user_file}:mine", "--json", "--accelerator", "v5e-8"))
    config = Config.from_json(text)
    assert config.steps == 30
    assert json.loads(text)["remat"] == "full"


def test_diff_prints_what_differs(capsys, user_file):
    lines = run(capsys, "diff", f"{user_file}:mine", f"{user_file}:other")
    rows = [line.split() for line in lines]
    assert rows[0] == [f"{user_file}:mine", f"{user_file}:other"]
    assert ["optimizer", "optax.adamw", "optax.lion"] in rows
    assert ["optimizer.nesterov", "false", "-"] in rows
    assert ["layers.1.heads", "2", "4"] in rows
    assert not any(row[0].startswith("layers.0") for row in rows)
    same = run(capsys, "diff", f"{user_file}:mine", f"{user_file}:mine", "--config.steps=3")
    assert same == [f"{user_file}:mine and {user_file}:mine do not differ"]
    both = run(capsys, "diff", f"{user_file}:mine", f"{user_file}:other", "--config.layers.1.heads=9")
    assert not any(line.startswith("layers.1") for line in both)


def test_mistakes(capsys, user_file):
    mine = f"{user_file}:mine"
    cases = [
        ((), "say what to do: list, show NAME, or diff A B"),
        (("shwo", mine), "no action 'shwo'; did you mean 'show'?"),
        (("show",), "show takes 1 names of configs, given 0"),
        (("diff", mine), f"diff takes 2 names of configs, given 1: {mine}"),
        (("list", mine), "list takes 0 names"),
        (("diff", mine, mine, "--json"), "--json goes with show"),
        (("list", "--config.a=1"), "list takes neither overrides"),
        (("show", mine, "--config.a=1"), "--config.a=1: no such field"),
    ]
    for argv, message in cases:
        assert message in fail(capsys, *argv)


def test_terminals_get_colors_and_lines_that_fit(capsys, user_file, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = run(capsys, "show", f"{user_file}:mine", "--config.steps=7")
    assert any("\x1b[" in line for line in lines)
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert all(len(line) <= 60 for line in plain if not line.startswith("?"))
    assert any(line.endswith("…") for line in plain)
    assert any(line.startswith("steps = 7") and "<- command line" in line for line in plain)


def test_help_tells_the_grammar(capsys):
    with pytest.raises(SystemExit) as caught:
        verb.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "--config.PATH VALUE" in text
    assert "list | show NAME | diff A B" in text


def test_every_verb_is_listed_with_its_first_line(capsys):
    verbs = entry.verbs()
    assert verbs["configs"] == summary(verb)
    assert "cli" not in verbs
    assert "__main__" not in verbs
    assert all(verbs.values()), "a verb's docstring says what it does"
    assert entry.main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in verbs)
    assert entry.main(["confgis"]) == 2
    assert "did you mean 'configs'?" in capsys.readouterr().err


def test_the_entry_passes_arguments_and_exit_codes_on(capsys, user_file):
    assert entry.main(["configs", "show", f"{user_file}:mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 10
    assert entry.main(["configs", "shwo"]) == 2


def test_field_docs_from_docstrings():
    def target(x, y, z):
        """Does it.

        Args:
            x: the first. Not this.
            y (int, optional): the
                second: with a colon; see :func:`optax.adamw`
            z: e.g. 0.5 of it.

        Returns:
            w: nothing.
        """

    assert field_docs(target) == {
        "x": "the first",
        "y": "the second: with a colon; see `optax.adamw`",
        "z": "e.g. 0.5 of it",
    }

    class Base:
        """Base.

        Args:
            dim: its width
        """

    class Child(Base):
        """Child."""

        def __init__(self, heads):
            """Makes one.

            Args:
                heads: many
            """

    assert field_docs(Child) == {"dim": "its width", "heads": "many"}
    assert "Exponential decay rate" in field_docs(optax.adamw)["b1"]
    assert field_docs(print) == {}


def test_values_print_as_one_would_type_them():
    for value in (
        None,
        True,
        3,
        1e-4,
        "full",
        "a/b-c.d:e",
        "a b",
        "none",
        "3",
        "true",
        "",
        [1, "x"],
        {"a": 1},
        float("inf"),
    ):
        text = as_text(value)
        if not isinstance(value, str):
            assert literal(text) == value or value == float("inf")
        else:
            assert text.strip("'") == value
    assert as_text("none") == "'none'"
    assert as_text("3") == "'3'"


def test_describe_walks_components_and_leaves(user_file):
    lines = list(describe(configs.load(f"{user_file}:mine")))
    assert lines[0].component
    assert lines[0].path == ""
    assert lines[0].doc == "The experiment."
    assert {line.path for line in lines if line.component} >= {"optimizer", "layers.0", "layers.1"}
