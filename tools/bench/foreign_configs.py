"""Plans public configs of other frameworks by `plimsoll plan --from`, and compares them with published measurements.

    python -m tools.bench.foreign_configs --mirrors=DIR                  # all of foreign_configs.jsonl
    python -m tools.bench.foreign_configs --mirrors=DIR --only axolotl   # those with the word in framework or path
    python -m tools.bench.foreign_configs --mirrors=DIR --missing --most=12
    python -m tools.bench.foreign_configs --mirrors=DIR --only qlora-1b --compiled   # with '.[plan-gpu]'
    python -m tools.bench.foreign_configs --table                        # only the page, from existing results

DIR has a git directory for each repository: OWNER+NAME/repo, OWNER/NAME, or OWNER/NAME/.git. Files are read at the
commits of foreign_configs.jsonl; nothing in them is executed. The results are in docs/benchmarks/foreign_configs.jsonl,
and docs/benchmarks/foreign_configs.md is generated from them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import median

from plimsoll.framework.plan import targets
from plimsoll.framework.terminal.tables import human_duration
from plimsoll.launch import cli, plan, plan_foreign
from plimsoll.launch.plan_common import resolve_target
from tools.bench.public_record import read_record
from tools.bench.record_page import judge_facts
from tools.bench.record_results import PlannedFact

LIST = Path(__file__).with_name("foreign_configs.jsonl")
RESULTS = Path(__file__).parents[2] / "docs/benchmarks/foreign_configs.jsonl"
_GIB = 2.0**30


@dataclass(frozen=True)
class Measured:
    """What a repository measured of the run of a config.

    Attributes:
        peak_gib: GiB allocated at the peak, on the last rank.
        state_gib: GiB allocated between steps.
        seconds: median time of a step.
        path: file with the figures.
    """

    peak_gib: float
    state_gib: float
    seconds: float | None
    path: str


@dataclass(frozen=True)
class PublicConfig:
    """One line of the list.

    Attributes:
        framework: name of the framework.
        repository: owner/name on GitHub.
        commit, path: commit and path of the file.
        target: value of --target.
        files: paths of further files for --from, in the same repository.
        args: arguments after the files.
        needs: paths of files that the file refers to, and which have to be near it.
        measured: figures of the repository for this run.
        fact: number of a fact in the public record that describes the same run.
        differs: what differs from the measured run.
    """

    framework: str
    repository: str
    commit: str
    path: str
    target: str
    files: list[str] = field(default_factory=list)
    args: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    measured: Measured | None = None
    fact: int | None = None
    differs: str = ""

    @property
    def identity(self) -> str:
        """A text that identifies the line."""
        return json.dumps([self.repository, self.commit, self.path, self.target, self.files, self.args])


@dataclass(frozen=True)
class PlannedConfig:
    """Our plan of a config.

    Attributes:
        identity: identity of its line.
        model: name of the model.
        devices: number of devices.
        fits: verdict.
        peak_gib: GiB of device memory, per device.
        limit_gib: GiB that a program may use.
        seconds: estimated time of a step.
        tokens_per_second: tokens per second on all devices.
        flops_per_second: model FLOP/s of a device.
        state_gib: GiB of weights, gradients and optimizer state, as the framework stores them.
        last_stage_gib: GiB on the last stage of a pipeline, or peak_gib without one.
        unknown: settings that were not understood.
        notes: number of notes about approximations.
        refused: why there is no plan.
        date: day of the plan.
        compiled_extra_gib: the compiler's peak of our step minus our estimate of it; None if it was not compiled.
        compiled_date: day of that compilation.
    """

    identity: str
    model: str = ""
    devices: int = 0
    fits: bool = False
    peak_gib: float = 0.0
    limit_gib: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    state_gib: float = 0.0
    last_stage_gib: float = 0.0
    unknown: list[str] = field(default_factory=list)
    notes: int = 0
    refused: str = ""
    date: str = ""
    compiled_extra_gib: float | None = None
    compiled_date: str = ""


def read_list() -> list[PublicConfig]:
    """Read the list of public configs."""
    configs = []
    for line in LIST.read_text().splitlines():
        values = json.loads(line)
        if "measured" in values:
            values["measured"] = Measured(**values["measured"])
        configs.append(PublicConfig(**values))
    return configs


def read_results() -> dict[str, PlannedConfig]:
    """Read the results by the identity of their lines."""
    if not RESULTS.exists():
        return {}
    results = [PlannedConfig(**json.loads(line)) for line in RESULTS.read_text().splitlines()]
    return {result.identity: result for result in results}


def plan_config(config: PublicConfig, mirrors: Path, *, compiled: bool = False) -> PlannedConfig:
    """Plan a config in this process.

    Args:
        config: the config.
        mirrors: folder with the git directories of the repositories.
        compiled: also compile our step.
    """
    with tempfile.TemporaryDirectory(prefix="plimsoll-foreign-") as name:
        folder = Path(name)
        for path in [config.path, *config.files, *config.needs]:
            _check_out(config, path, mirrors, folder)
        paths = [folder / path for path in [config.path, *config.files]]
        try:
            return _plan(config, paths, compiled=compiled)
        except ValueError as error:
            refused = str(error).replace(f"{folder}/", "")
            return PlannedConfig(config.identity, refused=refused, date=str(date.today()))


def _plan(config: PublicConfig, paths: list[Path], *, compiled: bool) -> PlannedConfig:
    parser = cli.Parser("plan", plan.__doc__, shape_only=True)
    plan.add_flags(parser)
    args = parser.parse_flags([])
    run, name = plan_foreign.read_for_target(paths, config.args, config.target)
    machine = resolve_target(args, name)
    planned = plan_foreign.plan_run(parser, args, run, name, machine)
    report = planned.report
    last = report
    if run.mesh.stages > 1:
        last = plan_foreign.plan_run(parser, args, run, name, machine, last_stage=True).report
    rate = None if report.time is None else report.time.tokens_per_second
    flops = None
    if rate is not None and report.model_flops_per_token is not None:
        flops = rate * report.model_flops_per_token / report.devices
    extra = None
    if compiled:
        args.compiled = True
        own = plan_foreign.plan_run(parser, args, run, name, machine).report
        if own.message or own.estimate is None:
            raise ValueError(f"the compiler refused the step: {own.message}")
        extra = round((own.device_peak_bytes - own.estimate.device_peak_bytes) / _GIB, 2)
    state = sum(report.breakdown[group] for group in ("parameters", "frozen", "gradients", "optimizer_state"))
    return PlannedConfig(
        config.identity,
        model=planned.run.model.name,
        devices=report.devices,
        fits=report.fits,
        peak_gib=round(report.device_allocated_bytes / _GIB, 2),
        limit_gib=None if report.device_limit_bytes is None else round(report.device_limit_bytes / _GIB, 2),
        seconds=None if report.time is None else round(report.time.seconds, 3),
        tokens_per_second=rate,
        flops_per_second=flops,
        state_gib=round(state / _GIB, 2),
        last_stage_gib=round(last.device_allocated_bytes / _GIB, 2),
        unknown=list(run.unknown),
        notes=len(planned.run.notes),
        date=str(date.today()),
        compiled_extra_gib=extra,
        compiled_date="" if extra is None else str(date.today()),
    )


def _check_out(config: PublicConfig, path: str, mirrors: Path, folder: Path) -> None:
    """Write a file of a repository at its commit below a folder.

    Raises:
        FileNotFoundError: the repository or the file is not there.
    """
    owner, _, name = config.repository.partition("/")
    candidates = [mirrors / f"{owner}+{name}" / "repo", mirrors / owner / name / ".git", mirrors / owner / name]
    git = next((one for one in candidates if one.is_dir()), None)
    if git is None:
        raise FileNotFoundError(f"no git directory of {config.repository} in {mirrors}")
    shown = subprocess.run(
        ["git", f"--git-dir={git}", "show", f"{config.commit}:{path}"], capture_output=True, check=False
    )
    if shown.returncode:
        raise FileNotFoundError(f"{config.repository} at {config.commit} has no {path}")
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(shown.stdout)


# --- the page --------------------------------------------------------------------------------------------------------


def build_page(configs: list[PublicConfig], results: dict[str, PlannedConfig]) -> str:
    """Return the page: a summary, the comparisons with measured runs, and a table for each framework."""
    planned = [(config, results[config.identity]) for config in configs if config.identity in results]
    frameworks = list(dict.fromkeys(config.framework for config, _ in planned))
    lines = [
        "# Public configs of other frameworks",
        "",
        "`plimsoll plan --from` read these files of public repositories, at the commits of "
        "`tools/bench/foreign_configs.jsonl`. `python -m tools.bench.foreign_configs --mirrors=DIR` prints and writes "
        "this page. All plans are estimates, but for [those that were compiled](#compiled); nothing was run. "
        f"Last plan on {max((result.date for _, result in planned), default='')}: two CPU cores, "
        f"Python {sys.version_info.major}.{sys.version_info.minor}, jax {_jax_version()}.",
        "",
        "| framework | configs | planned | fit | settings not understood |",
        "|---|---|---|---|---|",
    ]
    for framework in frameworks:
        rows = [result for config, result in planned if config.framework == framework]
        read = [result for result in rows if not result.refused]
        unknown = sum(len(result.unknown) for result in read)
        lines.append(f"| {framework} | {len(rows)} | {len(read)} | {sum(result.fits for result in read)} | {unknown} |")
    lines += ["", *_measured_section(planned), "", *_ALLOCATED, "", *_record_section(planned)]
    lines += ["", *_compiled_section(planned)]
    for framework in frameworks:
        lines += [
            "",
            f"## {framework}",
            "",
            "| config | model | devices | verdict | needs, GiB | a step |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_row(config, result) for config, result in planned if config.framework == framework]
    return "\n".join(lines) + "\n"


def _jax_version() -> str:
    # Imported here: only the page needs it.
    import jax

    return jax.__version__


def _measured_section(planned: list[tuple[PublicConfig, PlannedConfig]]) -> list[str]:
    """Return the comparison with figures that the repositories of the configs have."""
    rows = [(config, result) for config, result in planned if config.measured is not None and not result.refused]
    lines = [
        "## Measured by the same repository",
        "",
        "Megatron-LM's functional tests store bytes that PyTorch allocated, on the last rank, and the time of a step "
        "(`golden_values_*.json` next to each config). With a pipeline, our column is the last stage. Bytes between "
        "steps are weights, "
        "gradients and optimizer state.",
        "",
        "| config | target | between steps, GiB: theirs | ours | error | peak, GiB: theirs | ours | error "
        "| a step: theirs | ours |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    errors = []
    for config, result in rows:
        measured = config.measured
        assert measured is not None
        peak_error = result.last_stage_gib / measured.peak_gib - 1
        errors.append(abs(peak_error))
        theirs = "" if measured.seconds is None else human_duration(measured.seconds)
        ours = "" if result.seconds is None else human_duration(result.seconds)
        lines.append(
            f"| {_link(config)} | {config.target} | {measured.state_gib} | {result.state_gib} "
            f"| {result.state_gib / measured.state_gib - 1:+.1%} | {measured.peak_gib} | {result.last_stage_gib} "
            f"| {peak_error:+.1%} | {theirs} | {ours} |"
        )
    if errors:
        lines += ["", f"Median error of {len(errors)} peaks: {median(errors):.1%}."]
    lines += [f"- {config.path}: {config.differs}" for config, _ in rows if config.differs]
    return lines


def _record_section(planned: list[tuple[PublicConfig, PlannedConfig]]) -> list[str]:
    """Return the comparison with facts of the public record that describe the same runs."""
    facts = read_record()
    lines = [
        "## Measured in the public record",
        "",
        "Facts of [the public record](public_record.md) about the run of a config, changed by these arguments. A ratio "
        "is ours over theirs.",
        "",
        "| config | arguments | published | needs, GiB | memory ratio | rate ratio | why, if beyond a quarter |",
        "|---|---|---|---|---|---|---|",
    ]
    for config, result in planned:
        if config.fact is None or result.refused:
            continue
        fact = facts[config.fact - 1]
        plan_of_fact = PlannedFact(
            fact=config.fact,
            command="",
            compiled=False,
            fits=result.fits,
            peak_bytes=round(result.peak_gib * _GIB),
            tokens_per_second=result.tokens_per_second,
            flops_per_second=result.flops_per_second,
            date=result.date,
            versions={},
            limit_bytes=None if result.limit_gib is None else round(result.limit_gib * _GIB),
        )
        (judged,) = judge_facts(facts, {config.fact: plan_of_fact})
        memory = "" if judged.peak_ratio is None else f"{judged.peak_ratio:.2f}"
        rate = "" if judged.rate_ratio is None else f"{judged.rate_ratio:.2f}"
        lines.append(
            f"| {_link(config)} | {' '.join(config.args)} | {fact.line()} | {result.peak_gib} | {memory} | {rate} "
            f"| {judged.reason} |"
        )
    return lines


def _compiled_section(planned: list[tuple[PublicConfig, PlannedConfig]]) -> list[str]:
    """Return the comparison of estimated with compiled plans."""
    rows = [(config, result) for config, result in planned if result.compiled_extra_gib is not None]
    days = sorted({result.compiled_date for _, result in rows})
    lines = [
        "## Compiled",
        "",
        "`plimsoll plan --from FILE --compiled` compiles the step of our flags with XLA's GPU compiler, without a GPU; "
        "what the other framework stores differently is added as in the estimate. Peaks alive, without packing gaps. "
        f"Run on {' and '.join(days)}: two CPU cores, Python 3.11, jax 0.10.2, jax-cuda12-plugin 0.10.2, by this tool "
        "with `--compiled`.",
        "",
        "| config | target | estimated, GiB | compiled, GiB | ratio |",
        "|---|---|---|---|---|",
    ]
    ratios = []
    for config, result in rows:
        assert result.compiled_extra_gib is not None
        compiled = result.peak_gib + result.compiled_extra_gib
        ratios.append(compiled / result.peak_gib)
        lines.append(f"| {_link(config)} | {config.target} | {result.peak_gib} | {compiled:.2f} | {ratios[-1]:.2f} |")
    if ratios:
        lines += ["", f"Median ratio of {len(ratios)}: {median(ratios):.2f}."]
    return lines


# Printed by `python -m tools.bench.torch_reserved`; the published figures are in public_record.jsonl.
_ALLOCATED = [
    "## Allocated and reserved",
    "",
    "Our figures are bytes that PyTorch allocates. Its caching allocator reserves more, as free blocks do not always "
    "fit the next request; `nvidia-smi` shows reserved bytes and the CUDA context. `python -m "
    "tools.bench.torch_reserved` traces a step of transformers and peft on fake tensors, and replays it on a model of "
    "that allocator: LLaMA-Factory's QLoRA of Llama 2 7B, rank 8, one row per microbatch, in GB. Run on 2026-12-01 on "
    "two CPU cores shared with other programs, Python 3.11, torch 2.13, transformers 5.23, peft 0.21; published by "
    "[LLaMA-Factory](https://github.com/hiyouga/LLaMA-Factory/wiki/Performance-comparison) for an A100, in whole GB.",
    "",
    "| tokens | ours | allocated | reserved | published |",
    "|---|---|---|---|---|",
    "| 1,024 | 4.86 | 4.71 | 5.17 | 6 |",
    "| 8,192 | 9.40 | 9.52 | 11.81 | 12 |",
]


def _link(config: PublicConfig) -> str:
    name = "/".join(Path(config.path).parts[-3:])
    return f"[{name}](https://github.com/{config.repository}/blob/{config.commit}/{config.path})"


def _row(config: PublicConfig, result: PlannedConfig) -> str:
    name = _link(config)
    extra = [*(Path(file).name for file in config.files), *config.args]
    if extra:
        name += f" {' '.join(extra)}"
    if result.refused:
        return f"| {name} | | {config.target} | refused: {result.refused} | | |"
    limit = "" if result.limit_gib is None else f" of {result.limit_gib}"
    seconds = "" if result.seconds is None else human_duration(result.seconds)
    target = (
        config.target
        if result.devices == targets.resolve(config.target).num_devices
        else f"{config.target}x{result.devices}"
    )
    verdict = "fits" if result.fits else "too big"
    return f"| {name} | {result.model} | {target} | {verdict} | {result.peak_gib}{limit} | {seconds} |"


@cli.main
def main(argv: list[str]) -> int:
    """Plan the configs and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--mirrors", type=Path, metavar="DIR", help="folder with the git directories of the repositories"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="WORD", help="only configs that contain all these words"
    )
    parser.add_argument("--compiled", action="store_true", help="also compile our step with the target's compiler")
    parser.add_argument("--missing", action="store_true", help="only configs without a result")
    parser.add_argument("--most", type=int, metavar="N", help="stop after N configs")
    parser.add_argument("--table", action="store_true", help="only write the page")
    args = parser.parse_args(argv)
    configs = read_list()
    results = read_results()
    if not args.table:
        if args.mirrors is None:
            raise cli.UsageError("--mirrors=DIR is required, or --table")
        if args.compiled:
            # For XLA's GPU compiler, which needs no GPU.
            targets.set_environment("h100")
        cli.prepare_jax()
        if args.compiled:
            # Imported here, after the environment is set. Programs from the cache lack information about their buffers.
            import jax

            jax.config.update("jax_enable_compilation_cache", False)
        count = 0
        for config in configs:
            text = f"{config.framework} {config.repository} {config.path} {' '.join(config.args)}".lower()
            if not all(word.lower() in text for word in args.only) or (args.missing and config.identity in results):
                continue
            if count == args.most:
                break
            count += 1
            result = plan_config(config, args.mirrors, compiled=args.compiled)
            before = results.get(config.identity)
            if not args.compiled and before is not None:
                result = replace(
                    result, compiled_extra_gib=before.compiled_extra_gib, compiled_date=before.compiled_date
                )
            results[config.identity] = result
            verdict = result.refused or f"{result.peak_gib} GiB, fits: {result.fits}"
            print(f"{config.framework}: {config.path} {' '.join(config.args)}: {verdict}", flush=True)
            _write_results(configs, results)
    RESULTS.with_suffix(".md").write_text(build_page(configs, results))
    print(f"page: docs/benchmarks/{RESULTS.with_suffix('.md').name}")
    return 0


def _write_results(configs: list[PublicConfig], results: dict[str, PlannedConfig]) -> None:
    """Write the results of configs that are still in the list, in its order."""
    kept = [results[config.identity] for config in configs if config.identity in results]
    RESULTS.write_text("".join(json.dumps(asdict(replace(result))) + "\n" for result in kept))


if __name__ == "__main__":
    sys.exit(main())
