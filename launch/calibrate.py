"""Measure the speed of this machine's devices once (half a minute), for the step times of `plimsoll plan`.

    plimsoll calibrate              # measures, prints and stores the rates
    plimsoll calibrate --show       # prints the stored rates

Measures matrix products, memory, elementwise operations, program launches from Python and, on accelerators, the links
to host memory and between devices. The rates are stored in $XDG_CACHE_HOME/plimsoll (~/.cache/plimsoll), by device
type, and plans for that type use them from then on. Nothing else should run during the measurement.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

from plimsoll.framework.terminal.exit_codes import ExitCode
from plimsoll.framework.terminal.tables import TableSection, render
from plimsoll.launch import cli


@cli.main
def main(argv: list[str]) -> int:
    """Measure the devices of this machine, or show earlier measurements."""
    parser = cli.Parser("calibrate", __doc__, takes_config=False)
    parser.add_argument("--show", action="store_true", help="print the stored rates without measuring")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_flags(argv)
    cli.prepare_jax()

    # Imported late, so that a typo on the command line shows immediately.
    import jax

    from plimsoll.framework.devices.accelerators import spec_for
    from plimsoll.framework.devices.environment import set_memory_fraction
    from plimsoll.framework.plan.step_time import device_rates

    set_memory_fraction()
    devices = jax.local_devices()
    name = spec_for(devices).name
    if args.show:
        rates = device_rates.load_measured_rates(name)
        if rates is None:
            raise cli.UsageError(f"no stored rates for {name} on this machine; run plimsoll calibrate")
    else:
        from plimsoll.extras.calibration.measure import measure_rates

        rates = measure_rates(devices)
        device_rates.save_rates(rates)
    print(
        json.dumps(asdict(rates), indent=1)
        if args.json
        else render(rate_sections(rates, str(device_rates.rates_path(name))))
    )
    return ExitCode.DONE


def rate_sections(rates: Any, path: str) -> list[TableSection]:
    """Build the tables of a device's rates: each kind of work at its smallest, middle and largest size.

    Args:
        rates: the rates of a device.
        path: file that stores them.
    """
    summary = [
        ["measured", rates.measured],
        ["stored in", path],
        ["program start", f"{1e6 * rates.program_start:.0f} us of Python"],
    ]
    for label, link in (("host link", rates.host_link), ("links", rates.links)):
        if link is not None:
            summary.append([label, f"{link / 1e9:.1f} GB/s"])
    rows = [["", "small", "", "middle", "", "large", ""]]
    for kind, curve in rates.curves.items():
        middle = len(curve.points) // 2
        row = [kind]
        for size, _ in (curve.points[0], curve.points[middle], curve.points[-1]):
            row += [f"{curve.rate(size) / 1e9:.1f}", f"at {_format_size(size)}"]
        rows.append(row)
    units = [
        ["product", "GFLOP/s, by the FLOPs of one product"],
        ["memory", "GB/s, by the bytes in use"],
        ["others", "billions of operations per second, by the number of operations"],
    ]
    return [TableSection(rates.device, summary), TableSection("rates", rows, True), TableSection("units", units)]


def _format_size(size: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g}{unit}"
    return f"{size:.0f}"


if __name__ == "__main__":
    sys.exit(main())
