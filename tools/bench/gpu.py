"""Run all checks that need a GPU: exactness, the plan's memory, link bandwidth and training speed.

    python -m tools.bench.gpu [exact memory link speed largest torch] [--out=F.json] [--minutes=10] [--dry]

exact     every schedule and placement against the plain one with everything on the device, float32 and bfloat16
memory    peak device memory in use, compared with the plan of the same program
link      bandwidth between device and pinned host memory, and the share of a transfer that computation hides
speed     tokens/s, MFU and peak of GPT-2 124M to Llama 3 8B; offloaded vs. resident state at 8k and 32k tokens
largest   a model of 65 billion parameters, and whether its loss falls
torch     GPT-2 in transformers and torch, compiled, bf16, compared with ours

Each row is a process with a time limit, so a failure costs one row. Each part takes at most --minutes. Rows are
written to --out as they finish, and a table is printed at the end. --dry runs tiny shapes on the CPU and measures
nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plimsoll.framework.terminal.tables import human_bytes

Row = dict[str, Any]
PARTS = ("exact", "memory", "link", "speed", "largest", "torch")
BAD = ("WRONG", "FAILED", "LOSS DOES NOT FALL")
HOSTED = {"state": "optimizer_state", "weights": "parameters", "inputs": "activations", "gradients": "gradients"}
WORDS = {f"{word}_hosted": {f"memory.{field}": "pinned_host"} for word, field in HOSTED.items()}
WORDS |= {x: {"memory.update": x} for x in ("after_backward", "streamed", "in_backward", "layer_programs")}
WORDS |= {x: {"memory.remat": x} for x in ("none", "full", "sqrt:2", "offload")}
WORDS |= {"at_once": {"memory.gradients": "none", "learner.clip": "none"}}
WORDS |= {"unrolled": {"model.stack.unroll": "0"}}
WORDS |= {"adafactor": {"learner.optimizer": "optax.adafactor", "learner.optimizer.learning_rate": "0.02"}}
SCHEDULES = [  # overrides are in WORDS; NAME=VALUE sets a learner field; weights_hosted=N offloads the first N layers
    "after_backward state_hosted",
    "after_backward offload",
    "streamed full",
    "streamed full state_hosted",
    "streamed full state_hosted gradients_hosted",
    "in_backward full clip_mode=two_pass",
    "in_backward full clip_mode=previous_norm",
    "in_backward full clip_mode=update_rms",
    "in_backward full clip_mode=norm_growth clip=1.01",
    "in_backward full clip_mode=two_pass state_hosted",
    "layer_programs full",
    *(f"layer_programs full {word}_hosted" for word in HOSTED),
    "layer_programs full weights_hosted=2",
    "layer_programs full state_hosted weights_hosted gradients_hosted inputs_hosted",
    "layer_programs sqrt:2 state_hosted weights_hosted gradients_hosted inputs_hosted accumulate=2",
    "layer_programs full at_once",
    "layer_programs full at_once state_hosted weights_hosted inputs_hosted",
]
LAYERS = "layer_programs full state_hosted"
H200_BYTES = 128 * 2**30


def parse_overrides(settings_text: str) -> dict[str, str]:
    """Return the overrides for the words of a row, by dotted path."""
    found = dict[str, str]()
    for word in settings_text.split():
        name, _, value = word.partition("=")
        default = {f"learner.{name}": value}
        if name == "weights_hosted":
            default = {"memory.parameters": f"pinned_host:{value}"}
        found |= WORDS.get(word, default)
    return found


def build_rows(part: str, limit_bytes: int = H200_BYTES) -> list[Row]:
    """Return the rows of a part: what to measure, at which size, and the time limit in seconds.

    `--dry` runs only rows whose `dry` is true, with tiny shapes. `against` names the row that a speed is relative to.

    Args:
        limit_bytes: memory that a program may use on the device. By the plan, the sizes fit on an H200 (128 GiB)
            or else on an H100 (72.8 GiB): `plimsoll plan --target=h100 --config=...` with a row's settings.
    """
    is_large = limit_bytes >= H200_BYTES
    adamw = {"learner.optimizer": "optax.adamw", "learner.optimizer.learning_rate": "3e-4"}
    rows: list[Row] = []

    def train(config: str, size: str, settings_text: str, steps: int, seconds: int = 150, **more: Any) -> None:
        batch, _, seq = size.partition("x")
        sets = (
            parse_overrides(settings_text)
            if "adafactor" in settings_text
            else {**adamw, **parse_overrides(settings_text)}
        )
        row = {
            "kind": "train",
            "name": f"{config} {size} {settings_text}",
            "config": config,
            "sets": sets,
            "steps": steps,
        }
        rows.append({**row, "batch": int(batch), "seq": int(seq), "seconds": seconds, **more})

    if part == "exact":
        for dtype, master in (("float32", "none"), ("bfloat16", "float32")):
            types = {f"model.{name}_dtype": dtype for name in ("param", "compute")} | {"learner.master_dtype": master}
            for settings_text in SCHEDULES:
                dry = dtype == "float32" and settings_text in (SCHEDULES[0], SCHEDULES[5], SCHEDULES[-4])
                row = {
                    "kind": "exact",
                    "name": f"{settings_text} {dtype}",
                    "config": "llama3-8b",
                    "dry": dry,
                    "seconds": 120,
                }
                rows.append({**row, "sets": {**types, **parse_overrides(settings_text)}})
    elif part == "memory":
        for settings_text in ("none", "full", "streamed full", "in_backward full clip_mode=two_pass", LAYERS):
            train("gpt2-350m", "16x1024", settings_text, 3, dry=settings_text == "full")
        train("llama3-8b", "2x8192", "in_backward full clip_mode=update_rms moment_dtype=bfloat16 master_dtype=none", 3)
        train("llama3-8b", "2x8192", LAYERS, 3, 240)
    elif part == "link":
        rows += [
            {"kind": "link", "name": f"{n} MiB", "mib": n, "seconds": 90, "dry": n == 1} for n in (1, 16, 256, 2048)
        ]
    elif part == "speed":
        # A loop over layers copies each layer's residuals into a stack and out again; without the loop they stay put.
        for config in ("gpt2-124m", "gpt2-350m"):
            for settings_text in ("none unrolled", "none"):
                train(config, "32x1024", settings_text, 20, 240, dry=config == "gpt2-124m")
        for settings_text in ("full", "streamed full", LAYERS):
            train("gpt2-1.5b", "32x1024", settings_text, 8, against="gpt2-1.5b 32x1024 full")
        # With the whole state resident and in float32, it does not fit.
        resident = "full moment_dtype=bfloat16" + ("" if is_large else " master_dtype=none")
        for size in ("4x8192" if is_large else "3x8192", "1x8192"):
            for settings_text in (resident, LAYERS):
                train("llama3-8b", size, settings_text, 5, 240, against=f"llama3-8b {size} {resident}")
    elif part == "largest":
        lean = "layer_programs full at_once adafactor master_dtype=none moment_dtype=none inputs_hosted"
        for offloaded_layers in (8, 16) if is_large else (40, 48):
            train(
                "llama-65b",
                "2x2048",
                f"{lean} weights_hosted={offloaded_layers}",
                12,
                400,
                dry=offloaded_layers in (8, 40),
            )
    elif part == "torch":
        sizes = {"gpt2-124m": (12, 12, 768), "gpt2-350m": (24, 16, 1024), "gpt2-1.5b": (48, 25, 1600)}
        for config, (layers, heads, dim) in sizes.items():
            size = {"layers": layers, "heads": heads, "dim": dim, "seq_len": 1024, "batch": 32}
            row = {"kind": "torch", "name": f"{config} 32x1024 torch", "size": size, "steps": 10, "seconds": 180}
            ours = "full" if dim == 1600 else "none unrolled"
            rows.append({**row, "dry": dim == 768, "against": f"{config} 32x1024 {ours}"})
    return [{"part": part, **row} for row in rows]


def run(row: Row, dry: bool, seconds: float, log: Path) -> Row:
    """Run a row in its own process, for at most `seconds`, and return the row with its figures."""
    from tools.bench.gpu_rows import measure  # here only the function's name is needed; it runs in the new process

    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(row, dry, str(log), there), daemon=True)
    start = time.monotonic()
    process.start()
    there.close()
    try:
        result = here.recv() if here.poll(seconds) else {"status": f"over {seconds:.0f} s, ended"}
    except EOFError:
        process.join()
        result = {"status": "FAILED", "message": f"the process ended with {process.exitcode}"}
    process.join(5)
    process.kill()
    return {**row, **result, "seconds": round(time.monotonic() - start, 1)}


def text(row: Row) -> str:
    """Format a row's figures."""
    plan, peak, found = row.get("plan_bytes"), row.get("peak_bytes"), [row["message"]] if "message" in row else []
    found += [f"off by {row['off_by']:.0e} at {row['at']}, losses {row['loss_off_by']:.0e}"] if "off_by" in row else []
    if rate := row.get("tokens_per_second"):
        found += [f"{rate:,.0f} tokens/s"] + ([f"MFU {100 * row['mfu']:.1f}%"] if "mfu" in row else [])
    found += [f"{row['ratio']:.2f} times '{row['against']}'"] if "ratio" in row else []
    found += [f"peak {human_bytes(peak)}"] if peak else []
    found += [f"plan {human_bytes(plan)}" + (f" ({100 * (plan / peak - 1):+.1f}%)" if peak else "")] if plan else []
    found += [f"host {human_bytes(row['host_bytes'])}"] if row.get("host_bytes") else []
    found += ["loss {:.2f} to {:.2f}".format(*row["losses"])] if "losses" in row else []
    return "; ".join(found + [f"{name} {row[name]:.2f}" for name in row if "GB/s" in name or "hidden" in name])


def main(argv: list[str] | None = None) -> int:
    """Run the parts and print the table. Return 1 if anything was wrong, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--dry", action="store_true")
    args = parser.parse_args(argv)
    if args.dry:
        os.environ["JAX_PLATFORMS"] = "cpu"
    multiprocessing.set_forkserver_preload(["tools.bench.gpu_rows"])  # the forkserver imports it once, for all rows
    log = Path(tempfile.mkdtemp()) / "log.txt"
    machine = {"part": "machine", "kind": "machine", "name": "machine", "sets": {}}
    row_of_machine = run(machine, args.dry, 300, log)
    date, command = datetime.datetime.now().astimezone().isoformat(timespec="seconds"), shlex.join(sys.argv)
    facts, rows = {"date": date, "command": command, "dry": args.dry, "machine": row_of_machine}, list[Row]()
    print(f"{date}  {json.dumps(row_of_machine)}\noutput of the rows: {log}", flush=True)
    for part in PARTS if "all" in args.parts else args.parts:
        end = time.monotonic() + 60 * args.minutes

        def one(row: Row, end: float = end) -> Row:
            left = min(row["seconds"], end - time.monotonic())
            if left < 10:
                return {**row, "status": "not run: no time left (--minutes)"}
            return run(row, args.dry, left, log)

        rows_here = build_rows(part, row_of_machine.get("limit_bytes") or H200_BYTES)
        todo = [row for row in rows_here if not args.dry or row.get("dry")]
        with ThreadPoolExecutor(4 if part == "exact" and not args.dry else 1) as pool:
            for row in pool.map(one, todo):
                rates = {r["name"]: r.get("tokens_per_second") for r in [*rows, row]}
                if not args.dry and rates[row["name"]] and (base := rates.get(row.get("against"))):
                    row["ratio"] = rates[row["name"]] / base
                rows.append(row)
                args.out.write_text(json.dumps({**facts, "rows": rows}, indent=1))
                print(f"[{row['part']}] {row['name']}: {row['status']}; {text(row)}", flush=True)
    print(
        "dry run: the figures are not measurements\n" * args.dry
        + "\n| part | row | result | figures |\n|---|---|---|---|"
    )
    for row in rows:
        print(f"| {row['part']} | {row['name']} | {row['status']} | {text(row)} |")
    return int(any(row["status"] in BAD for row in [facts["machine"], *rows]))


if __name__ == "__main__":
    sys.exit(main())
