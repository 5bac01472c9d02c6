"""Services that metrics are reported to beside the workdir: which packages they need, and MLflow's writer.

Importing this file imports none of the packages.
"""

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# For `mlflow_uri`: what MLFLOW_TRACKING_URI says, or else what MLflow itself does without one.
MLFLOW_DEFAULT = "default"
# MLflow's limit on the length of a parameter's value.
_MLFLOW_VALUE_LENGTH = 6000
# MLflow's limit on the parameters of one call.
_MLFLOW_BATCH = 100
# MLflow by itself tries for minutes, for which the training loop would wait.
_MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


def check_installed(wandb_project: str | None, mlflow_uri: str | None) -> None:
    """Checks that the packages of the services that are asked for are there, without importing them.

    Raises:
        ImportError: one is not installed; the message has the command that installs it.
    """
    if wandb_project is not None:
        _check_package("wandb", "wandb", "Weights & Biases (--wandb, trainer.wandb_project)")
    if mlflow_uri is not None:
        _check_package("mlflow", "mlflow", "MLflow (--mlflow, trainer.mlflow_uri)")


def _check_package(module: str, distribution: str, service: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f"{service} was asked for, and the package `{module}` is not installed; "
            f"`pip install {distribution}` installs it"
        )


class MlflowWriter:
    """Writes to an MLflow tracking server, database or folder.

    The run's id is stored in `workdir/mlflow_run_id`, so a resumed run continues the same curves. MLflow keeps what
    it was given: after a resume from an older step, its curves show the repeated steps twice (metrics.jsonl does not).

    Args:
        uri: of the server, or MLFLOW_DEFAULT.
        name: of the run.
        workdir: where the run's id is kept.
        config: JSON values by dotted path, which become the run's parameters.

    Raises:
        ImportError: the package is not installed.
        ValueError: the server cannot be reached, or refuses.
    """

    def __init__(self, uri: str, name: str, *, workdir: Path, config: Mapping[str, Any]):
        for variable, value in _MLFLOW_PATIENCE.items():
            os.environ.setdefault(variable, value)
        from mlflow.exceptions import MlflowException  # pyright: ignore[reportMissingImports]
        from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

        self._error = MlflowException
        try:
            self._client = MlflowClient(None if uri == MLFLOW_DEFAULT else uri)
            self._run_id = self._begin(name, workdir / "mlflow_run_id", config)
        except MlflowException as error:
            first_line = str(error).partition("\n")[0]
            raise ValueError(f"--mlflow={uri}: {first_line}") from error

    def _begin(self, name: str, id_file: Path, config: Mapping[str, Any]) -> str:
        """Begins a run, or goes on with that of the workdir; returns its id."""
        if id_file.exists():
            run_id = id_file.read_text()
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        experiment_name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "plimsoll")
        experiment = self._client.get_experiment_by_name(experiment_name)
        if experiment is None:
            experiment_id = self._client.create_experiment(experiment_name)
        else:
            experiment_id = experiment.experiment_id
        run_id = self._client.create_run(experiment_id, run_name=name).info.run_id
        id_file.write_text(run_id)
        self._log_parameters(run_id, config)
        return run_id

    def _log_parameters(self, run_id: str, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        parameters = [Param(path, str(value)[:_MLFLOW_VALUE_LENGTH]) for path, value in config.items()]
        for start in range(0, len(parameters), _MLFLOW_BATCH):
            self._client.log_batch(run_id, params=parameters[start : start + _MLFLOW_BATCH])

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Logs one row.

        Raises OSError: the server does not answer; nothing else is lost of the row, which may be written again.
        """
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        milliseconds = int(1000 * time.time())
        values = [Metric(name, float(value), milliseconds, step) for name, value in metrics.items()]
        try:
            self._client.log_batch(self._run_id, metrics=values)
        except self._error as error:
            raise OSError(str(error).partition("\n")[0]) from error

    def resume(self, from_step: int) -> None:
        """Says from which step the run went on."""
        self.write(from_step, {"resumed_from": from_step})

    def close(self) -> None:
        """Marks the run as over. A later start of the same workdir goes on with it."""
        try:
            self._client.set_terminated(self._run_id)
        except self._error as error:
            raise OSError(str(error).partition("\n")[0]) from error
