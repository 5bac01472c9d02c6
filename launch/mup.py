"""Check that activations keep their size as a model gets wider, under muP and under the usual parametrization.

    plimsoll mup --config=nanogpt-cpu --heads=1,2,4,8,16 --workdir=runs/mup

Each width is trained for a few steps on one batch. The config's own width is the base of muP (docs/scaling.md).
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.framework.terminal.phases import phase
from plimsoll.framework.terminal.tables import TableSection, render
from plimsoll.launch import cli

if TYPE_CHECKING:
    from plimsoll.extras.scaling.coordinates import Coordinate
    from plimsoll.framework.config import Config


@cli.main
def main(argv: list[str]) -> int:
    """Run the verb; returns 0 once both tables and the picture are there."""
    parser = cli.Parser("mup", __doc__)
    parser.add_data()
    parser.add_argument("--heads", required=True, metavar="N,N,...", help="widths to train, in heads of attention")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="number of updates; default 4")
    parser.add_argument("--workdir", required=True, metavar="DIR", help="folder for the tokenizer, tokens and mup.png")
    command = parser.parse(argv)
    widths = _parse_heads(command.args.heads)
    if command.args.steps < 1:
        raise cli.UsageError(f"--steps={command.args.steps}: expected at least 1")

    # Imported late, so that a mistake on the command line shows immediately.
    import jax

    from plimsoll.extras.scaling.coordinates import measure_coordinates, plot_coordinates
    from plimsoll.extras.scaling.mup import widen
    from plimsoll.framework.devices.accelerators import accelerator_name

    cli.prepare_jax()
    for note in command.notes:
        print(note, file=sys.stderr)
    base, rule_lines = command.resolve(accelerator_name(jax.devices()))
    for line in rule_lines:
        print(line, file=sys.stderr)
    configs: dict[str, list[Config]] = {
        name: [widen(base, heads, mup=is_mup) for heads in widths] for name, is_mup in (("muP", True), ("usual", False))
    }
    workdir = Path(command.args.workdir).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    coordinates: dict[str, list[Coordinate]] = {}
    for name, scaled in configs.items():
        coordinates[name] = []
        for config in scaled:
            with phase(f"training width {config.model.dim} for {command.args.steps} steps ({name})"):
                coordinates[name] += measure_coordinates(config, command.args.steps, workdir)
    sections = [_make_table(name, measured) for name, measured in coordinates.items()]
    print(render(sections), end="")
    print(plot_coordinates(coordinates, workdir / "mup.png"))
    return ExitCode.DONE


def _parse_heads(text: str) -> list[int]:
    try:
        widths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        widths = []
    if len(widths) < 2 or widths[0] < 1:
        raise cli.UsageError(f"--heads={text}: expected at least two numbers of heads, such as 1,2,4,8")
    return widths


def _make_table(name: str, coordinates: Sequence["Coordinate"]) -> TableSection:
    """Return a table of the activations at initialization, and of their changes after the last update."""
    from plimsoll.extras.scaling.coordinates import fit_growth, group_by_activation

    last = max(one.step for one in coordinates)
    widths = dict.fromkeys(one.width for one in coordinates)
    rows = [["width", *map(str, widths), "grows like"]]
    for step, suffix in ((0, ", at first"), (last, f", change after {last} step{'s' if last > 1 else ''}")):
        for activation, sizes in group_by_activation(coordinates, step).items():
            cells = [f"{one.size:.3g}" for one in sizes]
            rows.append([activation + suffix, *cells, f"width^{fit_growth(sizes):+.2f}"])
    return TableSection(f"mean size of activations, {name} parametrization", rows, numbers=True)


if __name__ == "__main__":
    sys.exit(main())
