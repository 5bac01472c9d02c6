"""Stores the measured rates of a kind of device in a file under $XDG_CACHE_HOME, on this machine."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from plimsoll.framework.plan.cache import rates_folder
from plimsoll.framework.plan.step_time.device_rates import DeviceRates, TimeCurve


def rates_path(device: str) -> Path:
    """Return the file that stores the rates of a kind of device.

    Args:
        device: name of the kind of device, such as "h100".
    """
    return rates_folder() / f"{device}.json"


def save(rates: DeviceRates) -> Path:
    """Write the rates of a device, and return the file.

    Raises:
        OSError: the file cannot be written.
    """
    path = rates_path(rates.device)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write to another file first, so that an interrupted write leaves no damaged rates.
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(asdict(rates), indent=1) + "\n")
    temporary.replace(path)
    return path


def load(device: str) -> DeviceRates | None:
    """Load the measured rates of a device; None if it was never measured, or if the file is damaged."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        fields = json.loads(rates_path(device).read_text())
        curves = {}
        for kind, curve in fields.pop("curves").items():
            points = tuple((float(amount), float(seconds)) for amount, seconds in curve["points"])
            curves[kind] = TimeCurve(points)
        return DeviceRates(curves=curves, **fields)
    return None
