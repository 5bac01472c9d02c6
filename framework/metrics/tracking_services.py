"""External services that receive metrics in addition to the workdir: a check of their packages, and MLflow's writer.

Importing this module imports none of those packages.
"""

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Value of `mlflow_uri` that selects MLFLOW_TRACKING_URI, or else MLflow's own default.
MLFLOW_DEFAULT = "default"
# MLflow's limit on the length of a parameter's value.
_MLFLOW_VALUE_LENGTH = 6000
# MLflow's limit on the number of parameters per call.
_MLFLOW_BATCH = 100
# By default MLflow retries for minutes, and would block the training loop.
_MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


def check_installed(wandb_project: str | None, mlflow_uri: str | None) -> None:
    """Check that the packages of the requested services are installed, without importing them.

    Raises:
        ImportError: a package is not installed. The message contains the command that installs it.
    """
    if wandb_project is not None:
        _check_package("wandb", "wandb", "Weights & Biases (--wandb, trainer.wandb_project)")
    if mlflow_uri is not None:
        _check_package("mlflow", "mlflow", "MLflow (--mlflow, trainer.mlflow_uri)")


def _check_package(module: str, distribution: str, service: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f"{service} is requested, but the package `{module}` is not installed; run `pip install {distribution}`"
        )


class MlflowWriter:
    """Writes to an MLflow tracking server, database or folder.

    The run id is stored in `workdir/mlflow_run_id`, so a resumed run continues the same curves. MLflow keeps all
    logged rows: after a resume from an older step, its curves show the repeated steps twice (metrics.jsonl does not).

    Args:
        uri: URI of the server, or MLFLOW_DEFAULT.
        name: name of the run.
        workdir: folder in which the run id is stored.
        config: JSON values by dotted path, which become the parameters of the MLflow run.

    Raises:
        ImportError: the package is not installed.
        ValueError: the server cannot be reached, or rejects the request.
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
        """Create a run, or continue the one of the workdir. Return its id."""
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
        """Log one row. Raises OSError if the server does not respond; the row can then be written again."""
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        milliseconds = int(1000 * time.time())
        values = [Metric(name, float(value), milliseconds, step) for name, value in metrics.items()]
        try:
            self._client.log_batch(self._run_id, metrics=values)
        except self._error as error:
            raise OSError(str(error).partition("\n")[0]) from error

    def resume(self, from_step: int) -> None:
        """Log the step from which the run continues."""
        self.write(from_step, {"resumed_from": from_step})

    def close(self) -> None:
        """Mark the run as finished. A later start with the same workdir continues it."""
        try:
            self._client.set_terminated(self._run_id)
        except self._error as error:
            raise OSError(str(error).partition("\n")[0]) from error
