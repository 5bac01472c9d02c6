"""Reports to draw, and a real browser that reports its layout of a page of plans."""

import html
import json
import re
import shutil
import subprocess

import pytest

from plimsoll.framework.plan.plan_report import PlanReport

GIB = 2**30
GROUPS = ("parameters", "frozen", "buffers", "gradients", "optimizer_state", "ema", "batch", "activations", "other")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = "quic background-networking component-update sync gpu"
FLAGS = ["--headless", "--no-sandbox", "--no-first-run", "--hide-scrollbars", "--enable-logging=stderr"]
FLAGS += [f"--disable-{part}" for part in QUIET.split()]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")

# The page reports its layout in CSS pixels, with left edges relative to the track.
# It is in a frame, because a window is never narrower than 500.
FRAME = '<pre id="probe"></pre><iframe width="{}" height="1500" frameborder="0" srcdoc="{}"></iframe>'
PROBE = """<script>
const seen = [...document.querySelectorAll('.bar')].map(bar => {
  const left = bar.querySelector('svg').getBoundingClientRect().x;
  const box = e => { const r = e.getBoundingClientRect(); return [r.x - left, r.width] };
  return {label: bar.firstChild.textContent, thin: bar.classList.contains('thin'),
    limit: [...bar.querySelectorAll('.limit')].map(e => box(e)[0]),
    parts: [...bar.querySelectorAll('rect[fill]')].map(e => [e.textContent, ...box(e)])} });
parent.document.getElementById('probe').textContent = JSON.stringify({bars: seen, view: innerWidth,
  page: document.documentElement.scrollWidth,
  cut: [...document.querySelectorAll('.scroll')].filter(e => e.scrollWidth > e.clientWidth).length,
  requests: performance.getEntriesByType('resource').map(e => e.name)});
</script>"""


def plan(remat="full", activations=2.0, *, allocated=None, limit=15.75, host=0.0, **more):
    """Return the report of roughly a 7B model on 16 chips; sizes are in GiB."""
    sizes = {
        "parameters": 0.8,
        "gradients": 0.8,
        "optimizer_state": 4.7 - host,
        "activations": activations,
        "other": 0.3,
    }
    parts = {group: int(sizes.get(group, 0) * GIB) for group in GROUPS}
    peak = sum(parts.values())
    phases = {"train": peak, "evaluation": 3 * GIB, "save": 5 * GIB}
    content = {
        **{"config": "llama2-7b", "settings": ["mesh.fsdp=16", f"memory.remat={remat}"], "target": "v5e-16"},
        **{"accelerator": "v5e", "devices": 16, "processes": 4, "mesh": {"data": 1, "fsdp": 16}, "estimated": False},
        **{"platform": "tpu", "mesh_across": {}},
        **{"fits": limit is None or peak <= limit * GIB, "device_limit_bytes": limit and int(limit * GIB)},
        **{"device_peak_bytes": peak, "device_allocated_bytes": int((allocated or 0) * GIB) or peak},
        **{"host_peak_bytes": int(host * GIB), "host_process_bytes": 4 * int(host * GIB), "host_limit_bytes": 47 * GIB},
        **{"breakdown": parts, "host_breakdown": dict.fromkeys(GROUPS, 0) | {"optimizer_state": int(host * GIB)}},
        "largest": [{"name": "kept for stack", "group": "activations", "bytes": GIB, "shape": "bf16[32]", "count": 2}],
        "phases": {name: {"device_peak_bytes": size, "host_peak_bytes": GIB} for name, size in phases.items()},
        **{
            "flops_per_step": 4e15,
            "flops_per_token": 6e10,
            "model_flops_per_token": 4.4e10,
            "item": "token",
            "host_transfer_bytes": 0,
        },
        **{"collective_bytes": {"all-gather": 38 * GIB}, "zero_gradients": [], "suggestions": [], "notes": []},
        **{"estimate": {"device_peak_bytes": peak, "breakdown": parts, "error": 0.031}, "compile_seconds": 98.4},
        **{"message": "", "versions": {"jax": "0.10.2", "libtpu": "0.0.42"}},
        **more,
    }
    return PlanReport.from_json(content)


TIME = {
    **{"seconds": 0.912, "tokens_per_second": 71861.0, "model_flops_utilization": None, "bound_by": "matrix units"},
    "parts": {"matrix units": 0.61, "memory": 0.12, "links": 0.15, "host link": 0.032, "Python": 0.0},
    "basis": "Estimated by published rates; it may be a third off.",
}
IN_EFFECT = {
    **{"memory.update": "after_backward", "memory.remat": "full", "memory.optimizer_state": "device"},
    **{"memory.gradients": "device", "memory.parameters": "device", "memory.activations": "device"},
    **{"learner.accumulate": 1, "data.global_batch_size": 16, "data.seq_len": 4096},
}
NONE = plan("none", 16.0, message="RESOURCE_EXHAUSTED:\nUsed 22.60G of 15.75G hbm.")
COMPARED = [
    NONE,
    plan("dots", 9.5),
    plan(allocated=9.1),
    plan("full", 1.5, host=4.0, settings=["mesh.fsdp=16", "a.b=c"]),
]


def browse(text, tmp_path, width=1200, *flags):
    """Return chromium's output for the page (its DOM by default), and the messages on its console."""
    file = tmp_path / f"{width}.html"
    file.write_text(text)
    profile = f"--user-data-dir={tmp_path / f'profile{width}'}"
    command = [str(CHROMIUM), *FLAGS, profile, f"--window-size={width},1500", *(flags or ["--dump-dom"]), file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def measure(text, tmp_path, width=1200):
    dom, messages = browse(FRAME.format(width, html.escape(text.replace("</body>", PROBE + "</body>"))), tmp_path)
    found = re.search(r'<pre id="probe">(.+?)</pre>', dom)
    assert found, dom[-500:]
    assert messages == []
    return json.loads(html.unescape(found[1]))
