"""The largest model of a family: sizes by the family's rule, the search over them, and the command."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from plimsoll import configs
from plimsoll.extras.autotune.autotune import TuningResult
from plimsoll.extras.autotune.settings import Machine, TunedSettings
from plimsoll.extras.largest import frontier_tables
from plimsoll.extras.largest.frontier import Frontier, FrontierSearch
from plimsoll.extras.largest.length_family import LengthFamily
from plimsoll.extras.largest.size_family import Size, SizeFamily, count_parameters
from plimsoll.framework.config import Config, ConfigError
from plimsoll.framework.plan.plan_report import SCHEMA_FILE
from plimsoll.launch import plan


def choice(parameters: int, *, compiled: bool = False) -> TunedSettings:
    """Return the choice for a size that takes two bytes per parameter."""
    machine = Machine("h100", 1, 80 << 30, None)
    return TunedSettings(machine, (), (), (), 2 * parameters, 0, 0, 1e-9 * parameters, 0.0, compiled)


class Answers:
    """Fake answers for a machine with room for `most` parameters by the estimate, and fewer by the compiler."""

    def __init__(self, most: float, by_the_compiler: float | None = None):
        self._most = {True: most, False: most if by_the_compiler is None else by_the_compiler}
        self.asked: list[int] = []

    def __call__(self, config: Config, estimate: bool) -> TuningResult:
        parameters = count_parameters(config)
        self.asked.append(parameters)
        if parameters > self._most[estimate]:
            return TuningResult(None, failure="too much")
        return TuningResult(choice(parameters, compiled=not estimate))

    def check(self, config: Config) -> str:
        return self(config, True).failure


def frontier(answers: Answers, *, compiles: bool = False) -> Frontier:
    family = SizeFamily.derive(configs.load("llama3-8b"))
    return FrontierSearch(family, answers, answers.check, compiles, lambda line: None).run("base config")


@pytest.mark.pairs
def test_width_and_depth_grow_together():
    family = replace(SizeFamily.derive(configs.load("llama3-8b")), widest=4)
    members = family.members()
    assert family.known == Size(32, 32)
    assert Size(32, 32) in [member.size for member in members]
    parameters = [member.amount for member in members]
    assert parameters == sorted(parameters)
    gaps = [after / before for before, after in itertools.pairwise(parameters[40:])]
    assert max(gaps) < 1.04, "the largest that fits is known to a few percent"
    for member in members[:: len(members) // 7]:
        config = family.scale_config(member.size)
        assert count_parameters(config) == member.amount
        assert config.model.dim == 128 * member.size.heads
        config.instantiate()
    wide = family.scale_config(Size(64, 64))
    attention = wide.model.stack.pattern[0].attention
    assert (wide.model.dim, attention.num_heads, attention.num_kv_heads) == (8192, 64, 8)
    assert wide.model.stack.pattern[0].mlp.hidden == 2 * 14336
    # This size is published under another name; its parameter count matches, except for a wider MLP.
    assert count_parameters(family.scale_config(Size(64, 80))) == pytest.approx(70.6e9, rel=0.01)


def test_key_heads_grow_in_multi_head_attention():
    family = SizeFamily.derive(configs.load("gpt2-124m"))
    config = family.scale_config(Size(24, 24))
    config.instantiate()
    assert count_parameters(family.scale_config(family.known)) == count_parameters(configs.load("gpt2-124m"))


@pytest.mark.pairs
@pytest.mark.parametrize(
    "name",
    ["gemma3-tiny", "qwen3-moe-tiny", "gpt-oss-tiny", "deepseek-tiny", "qwen3.5-tiny", "mamba2-tiny", "qwen3.6-27b"],
)
def test_other_families_grow(name: str):
    family = replace(SizeFamily.derive(configs.load(name)), widest=4)
    known = configs.load(name)
    assert family.scale_config(family.known) == known
    members = family.members()
    parameters = [member.amount for member in members]
    assert parameters == sorted(parameters)
    assert parameters[-1] > 8 * count_parameters(known)
    for member in members[:: len(members) // 3]:
        config = family.scale_config(member.size)
        assert count_parameters(config) == member.amount
        config.instantiate()


def test_linear_attention_and_experts_grow_with_the_width():
    family = SizeFamily.derive(configs.load("qwen3.6-35b-a3b"))
    assert family.known == Size(16, 40)
    known = family.config.model.stack.pattern
    wide = family.scale_config(Size(32, 40)).model
    linear, attention = wide.stack.pattern[0].attention, wide.stack.pattern[3].attention
    assert wide.dim == 2 * family.config.model.dim
    assert (linear.num_heads, linear.num_key_heads) == (2 * known[0].attention.num_heads, 16)
    assert (attention.num_heads, attention.num_kv_heads) == (32, 2)
    assert wide.stack.pattern[0].mlp.num_experts == 256
    assert wide.stack.pattern[0].mlp.experts.hidden == wide.stack.pattern[0].mlp.shared.hidden == 1024


def test_family_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="--largest requires a language model whose layers are Blocks"):
        SizeFamily.derive(configs.load("digits-nice"))


@pytest.mark.pairs
@pytest.mark.parametrize("most", [0.9e9, 8.1e9, 47e9])
def test_the_largest_that_fits_is_found(most: float):
    answers = Answers(most)
    found = frontier(answers)
    largest = found.points[-1].member.amount
    assert 0.96 * most < largest <= most
    assert len(answers.asked) < 25
    parameters = [point.member.amount for point in found.points]
    assert parameters == sorted(set(parameters))
    assert len(parameters) >= 2


def test_compiler_result_overrides_the_estimate():
    found = frontier(Answers(20e9, by_the_compiler=19e9), compiles=True)
    assert 17.5e9 < found.points[-1].member.amount <= 19e9
    assert found.points[-1].choice.compiled


def test_nothing_fits():
    found = frontier(Answers(1e6))
    assert (found.points, found.failure) == ([], "too much")
    largest, reasons = frontier_tables.frontier_sections([found])
    assert largest.rows[1] == ["base config", "none", *[""] * 6]
    assert reasons.rows == [["base config", "too much"]]


def test_rows_grow_in_small_steps():
    family = LengthFamily.derive(configs.load("llama3-8b"))
    lengths = [member.amount for member in family.members()]
    assert lengths == sorted(set(lengths))
    assert {128, 4096, 131072, 1 << 20} <= set(lengths)
    assert all(length % 128 == 0 for length in lengths)
    # Many devices can divide long rows.
    assert all(length % 1024 == 0 for length in lengths if length >= 1 << 16)
    assert max(after / before for before, after in itertools.pairwise(lengths[63:])) < 1.016
    config = family.scale_config(4096)
    assert family.measure(config) == config.data.seq_len == 4096
    assert config.data.global_batch_size == configs.load("llama3-8b").data.global_batch_size


def test_learned_positions_bound_the_rows():
    family = LengthFamily.derive(configs.load("gpt2-124m"))
    assert family.members()[-1].amount == 1024
    short = configs.load("gpt2-124m")
    short.model.embed.max_positions = 64
    with pytest.raises(ConfigError, match="rows of up to 64 tokens; the shortest row that is searched has 128"):
        LengthFamily.derive(short).members()
    with pytest.raises(ConfigError, match="--longest requires a language model"):
        LengthFamily.derive(configs.load("digits-nice"))


@pytest.mark.pairs
def test_the_longest_row_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture, file = tmp_path / "longest.png", tmp_path / "longest.json"
    flags = ["--config=stdlib-tiny", "--target=rtx3060", "--longest", "--estimate", "--config.data.global_batch_size=1"]
    flags += ["--config.memory.remat=full", "--config.memory.update=after_backward", "--device_memory_gib=2"]
    flags += ["--config.memory.optimizer_state=device", "--compare", "model.stack.num_layers=4,16"]
    assert plan.main([*flags, f"--picture={picture}", f"--json={file}"]) == 0
    said = capsys.readouterr()
    assert "longest row that fits" in said.out
    assert "tokens per row" in said.out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    lengths = [series["points"][-1]["seq_len"] for series in json.loads(file.read_text())]
    assert lengths[0] > lengths[1] > 8192, "a deeper model leaves less room"
    check_json(file)


def check_json(file: Path) -> None:
    """Check an output against the schema, and the batch of each point."""
    content = json.loads(file.read_text())
    jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text())).validate(content)
    for point in (point for series in content for point in series["points"]):
        assert point["batch"]["rows_per_step"] == 1
        assert point["batch"]["tokens_per_row"] == point.get("seq_len", 128)


@pytest.mark.pairs
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    picture, file = tmp_path / "largest.png", tmp_path / "largest.json"
    flags = ["--config=gpt2-124m", "--target=rtx3060", "--largest", "--estimate", "--config.data.global_batch_size=1"]
    # Fields that are set are not searched, so each size takes a fraction of a second.
    flags += ["--config.data.seq_len=128", "--config.memory.remat=full", "--config.memory.update=after_backward"]
    flags += ["--config.memory.optimizer_state=device", "--device_memory_gib=2", "--allow=moments"]
    assert plan.main([*flags, f"--picture={picture}", f"--json={file}"]) == 0
    said = capsys.readouterr()
    assert "largest model that fits" in said.out
    assert "base config, --allow=moments" in said.out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    check_json(file)
    plain, allowed = json.loads(file.read_text())
    sizes: list[Any] = [series["points"][-1]["parameters"] for series in (plain, allowed)]
    assert sizes[0] < sizes[1], "smaller moments leave room for a larger model"


def test_a_host_that_is_too_small_is_named(capsys: pytest.CaptureFixture[str]):
    flags = ["--config=gpt2-124m", "--target=rtx3060", "--largest", "--estimate", "--config.data.global_batch_size=1"]
    flags += ["--config.data.seq_len=128", "--config.memory.remat=full", "--config.memory.update=after_backward"]
    flags += ["--config.memory.optimizer_state=device", "--host_memory_gib=4"]
    assert plan.main(flags) == 4
    said = capsys.readouterr().out
    assert "nothing fits" in said
    assert "and 8.00 GiB per host, which has 4.00 GiB" in said


@pytest.mark.pairs
def test_several_targets_are_several_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "largest.json"
    flags = ["--config=gpt2-124m", "--target=rtx3060,rtx3090", "--largest", "--estimate"]
    flags += ["--config.data.seq_len=128", "--config.data.global_batch_size=1", "--config.memory.remat=full"]
    flags += ["--config.memory.update=after_backward", "--config.memory.optimizer_state=device"]
    assert plan.main([*flags, f"--json={file}"]) == 0
    assert "frontier, rtx3090x1" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert [series["name"] for series in content] == ["rtx3060x1", "rtx3090x1"]
    sizes: list[Any] = [series["points"][-1]["parameters"] for series in content]
    assert 1.8 < sizes[1] / sizes[0] < 2.4, "one card has 12 GB, the other 24, and both lose about the same to CUDA"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--largest", "--auto"], "--largest cannot be combined with --auto"),
        (["--picture=x.png"], "--picture requires --largest or --longest"),
        (["--largest", "--longest"], "--largest cannot be combined with --longest"),
        (["--longest", "--smallest"], "--longest cannot be combined with --auto or --smallest"),
        (["--largest", "--allow=roundng"], "'roundng' is not one of rounding, moments, optimizer8bit, fp8, int8"),
        (["--largest", "--picture=/nowhere/x.png"], "--picture=/nowhere/x.png: the folder /nowhere does not exist"),
        (["--largest", "--compare", "memory.remat"], "expected PATH=A,B"),
    ],
)
def test_conflicting_flags_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert plan.main(["--config=gpt2-124m", "--target=h100", *flags]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
