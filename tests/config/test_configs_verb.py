"""The output of `list`, `show` and `diff`, and the list of verbs."""

import functools
import inspect
import json

from plimsoll import configs
from plimsoll.framework.config import Config
from plimsoll.framework.config.value_parsing import as_text, parse_literal
from plimsoll.launch import __main__ as entry
from plimsoll.launch import configs as verb


def run(capsys, *argv: str) -> list[str]:
    assert verb.main(list(argv)) == 0
    return capsys.readouterr().out.splitlines()


def test_list_prints_names_and_first_lines(capsys, monkeypatch):
    def gpt() -> Config:
        """GPT-2.

        More.
        """
        raise AssertionError("listing builds no config")

    monkeypatch.setattr(configs, "functions", lambda: {"gpt2-124m": gpt, "x": gpt})
    assert run(capsys, "list") == ["gpt2-124m  GPT-2.", "x          GPT-2."]


def test_show_prints_one_line_per_leaf_with_its_doc(capsys, user_file, monkeypatch):
    lines = run(capsys, "show", f"{user_file}:mine")
    assert lines[0] == f"{user_file}:mine: My first config."
    by_path = {line.split(" = ")[0]: line for line in lines[1:] if " = " in line}
    assert by_path["optimizer"].split() == ["optimizer", "=", "optax.adamw", "#", "what", "updates"]
    assert by_path["layers.0.dim"].split(maxsplit=3)[2:] == ["?", "# its width, from the parent"]
    assert by_path["layers.1.heads"].split(maxsplit=3)[2:] == ["2", "# how many heads, over two lines"]
    assert by_path["note"] == "note = 'a b'"
    assert "One layer of it. More of that." in by_path["layers.0"]
    assert "Exponential decay rate" in by_path["optimizer.b1"]  # optax's own docstring
    assert lines[-1].startswith("?: not set here.")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, run(capsys, "show", f"{user_file}:mine"))) == 60


def test_show_is_short_by_default(capsys):
    def paths(*flags: str) -> list[str]:
        lines = run(capsys, "show", "nanogpt-cpu", *flags)
        return [line.split(" = ")[0] for line in lines if " = " in line]

    everything = paths("--all")
    short = paths("--config.health.hang_seconds=3", "--config.learner.optimizer=lion")
    assert len(short) < 70 < len(everything)
    assert set(short) >= {
        "model.dim",
        "trainer.max_steps",
        "memory.remat",
        "health.hang_seconds",
        "learner.optimizer.b1",
    }
    assert "health.status_seconds" not in short
    assert "fields; --all shows all" in run(capsys, "show", "nanogpt-cpu")[-1]
    learner = paths("--only=learner")
    assert learner == [path for path in everything if path == "learner" or path.startswith("learner.")]
    assert paths("--only", "head") == [path for path in everything if "head" in path]
    assert paths("--only=learner", "--only=status_sec") == [*learner, "health.status_seconds"]


def test_show_marks_rules_and_overrides(capsys, user_file):
    lines = run(capsys, "show", f"{user_file}:mine", "--accelerator=v5e-4", "--config.steps=7")
    assert "rule v5e-*: remat none -> full" in lines[1:4]
    assert not any("steps 10 -> 20" in line for line in lines), "the command line has another number"
    by_path = {line.split(" = ")[0]: line for line in lines[4:] if " = " in line}
    assert by_path["remat"].split(maxsplit=2)[2] == "full  <- rule v5e-*"
    assert by_path["steps"].split(maxsplit=2)[2] == "7  <- command line"
    assert "<-" not in by_path["layers.1.heads"]
    text = "\n".join(run(capsys, "show", f"--config={user_file}:mine", "--json", "--accelerator", "v5e-8"))
    assert Config.from_json(text).steps == 30


def test_diff_prints_only_differences(capsys, user_file):
    mine, other = f"{user_file}:mine", f"{user_file}:other"
    rows = [line.split() for line in run(capsys, "diff", mine, other)]
    assert rows[0] == [mine, other]
    assert ["optimizer", "optax.adamw", "optax.lion"] in rows
    assert ["optimizer.nesterov", "false", "-"] in rows
    assert ["layers.1.heads", "2", "4"] in rows
    assert not any(row[0].startswith("layers.0") for row in rows)
    assert run(capsys, "diff", mine, mine, "--config.steps=3") == [f"{mine} and {mine} are identical"]


def test_user_errors(capsys, user_file):
    mine = f"{user_file}:mine"
    for argv, message in [
        ((), "required: action"),
        (("shwo", mine), "invalid choice: 'shwo'"),
        (("diff", mine), "diff takes 2 config names, given 1"),
        (("diff", mine, mine, "--json"), "--json requires show"),
        (("list", "--config.a=1"), "overrides and --accelerator require show or diff"),
        (("show", mine, "--config.a=1"), "--config.a=1: no such field"),
        (("show", mine, "--only=optimiser"), "no field path contains it; did you mean 'optimizer'?"),
        (("diff", mine, mine, "--only=steps"), "--only and --all require show"),
        (("show", mine, "--all", "--json"), "at most one of --only, --all, --json"),
        (("show", mine, "--all", "--only=steps"), "at most one of --only, --all, --json"),
    ]:
        assert verb.main(list(argv)) == 2
        assert message in capsys.readouterr().err


def test_a_partial_is_summed_up_as_its_function():
    assert verb.summary(functools.partial(verb.summary, sum)) == str(inspect.getdoc(verb.summary)).partition("\n")[0]


def test_every_verb_is_listed_with_its_first_line(capsys, user_file):
    verbs = entry.verbs()
    assert set(verbs) >= {"train", "prepare", "configs"}
    assert not {"cli", "__main__"} & set(verbs)
    assert verbs["configs"] == (verb.__doc__ or "").splitlines()[0]
    assert all(verbs.values()), "a verb's docstring describes it"
    assert entry.main([]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in verbs)
    assert entry.main(["configs", "show", f"{user_file}:mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 10
    assert entry.main(["configs", "shwo"]) == 2


def test_values_print_in_command_line_syntax():
    for value in (None, True, 3, 1e-4, "full", "a/b-c.d:e", "a b", "none", "3", "", [1, "x"], {"a": 1}):
        assert parse_literal(as_text(value)) == value
