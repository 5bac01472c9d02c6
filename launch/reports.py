"""--wandb, --mlflow and --tensorboard: shortcuts for the fields of `trainer` that select where metrics are reported."""

import argparse
import os

# The config field that each flag sets.
_FIELDS = {"wandb": "trainer.wandb_project", "mlflow": "trainer.mlflow_uri", "tensorboard": "trainer.tensorboard"}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the three flags to a verb that trains."""
    group = parser.add_argument_group("reports, in addition to WORKDIR/metrics.jsonl")
    group.add_argument(
        "--wandb",
        nargs="?",
        const=os.environ.get("WANDB_PROJECT", "plimsoll"),
        metavar="PROJECT",
        help="report to Weights & Biases; its environment variables, such as WANDB_MODE, apply",
    )
    group.add_argument(
        "--mlflow", nargs="?", const="default", metavar="URI", help="report to MLflow; default URI: MLFLOW_TRACKING_URI"
    )
    group.add_argument(
        "--tensorboard",
        action=argparse.BooleanOptionalAction,
        help="write event files to WORKDIR/tensorboard; overrides trainer.tensorboard",
    )


def overrides(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return the (path, text) of the fields that the flags set; [] for a verb without them."""
    settings = []
    for flag, path in _FIELDS.items():
        value = getattr(args, flag, None)
        if value is not None:
            settings.append((path, str(value)))
    return settings
