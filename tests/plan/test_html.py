"""The page of plans in a real browser: bar lengths match bytes, nothing is fetched, and text is escaped."""

import itertools
import re
from html.parser import HTMLParser

import matplotlib.image
import numpy as np
import pytest

from plimsoll.extras.plan_page import COLORS, page
from tests.support.plan_pages import COMPARED, GIB, GROUPS, IN_EFFECT, NONE, TIME, browse, measure, needs_browser, plan


class Text(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags |= {tag, *(name for name, _ in attrs if name.startswith("on") or name in ("src", "srcset"))}

    def handle_data(self, data):
        self.text += data


@needs_browser
@pytest.mark.once("400")  # the narrow page is more likely to overflow
@pytest.mark.parametrize("width", [1200, 400])
def test_bars_are_as_long_as_their_bytes(tmp_path, width):
    seen = measure(page(COMPARED), tmp_path, width)
    assert seen["view"] == width
    assert seen["page"] <= width, "the page is wider than the window"
    assert seen["requests"] == []
    large = [bar for bar in seen["bars"] if not bar["thin"]]
    device, host = large[:4], large[4:]
    assert [bar["label"] for bar in device] == ["memory.remat=none", "memory.remat=dots", "memory.remat=full", "a.b=c"]
    scale = device[0]["limit"][0] / (15.75 * GIB)  # pixels per byte
    for bar, one in zip(device, COMPARED, strict=True):
        assert bar["limit"] == pytest.approx([15.75 * GIB * scale], abs=0.6)
        ends = np.cumsum(list(one.breakdown.values())) * scale
        np.testing.assert_allclose([x + w for _, x, w in bar["parts"][:-1]], ends, atol=0.6)
        np.testing.assert_allclose([w for _, _, w in bar["parts"][:-1]], np.diff(ends, prepend=0), atol=0.6)
        packing = one.device_allocated_bytes - one.device_peak_bytes
        assert bar["parts"][-1][2] == pytest.approx(packing * scale, abs=0.6)
    assert device[0]["parts"][-1][1] > device[0]["limit"][0] + 0.2 * width / 4, "what does not fit passes the line"
    assert device[0]["parts"][7][0] == "activations: 16.00 GiB"
    (host,) = host
    assert host["parts"][4][0] == "optimizer state: 16.00 GiB"  # of the 4 devices of a process
    assert host["parts"][4][2] / host["limit"][0] == pytest.approx(16 / 47, rel=0.02)
    thin = [bar["parts"][0][2] / bar["limit"][0] for bar in seen["bars"] if bar["thin"]]
    sizes = [phase.device_peak_bytes / (15.75 * GIB) for one in COMPARED for phase in one.phases.values()]
    np.testing.assert_allclose(thin, sizes, atol=0.02)


@needs_browser
def test_table_for_two_targets_names_both_and_is_not_cut(tmp_path):
    plans = [plan(host=3.0, time=TIME), plan(host=3.0, time=TIME, target="v5p-8", device_limit_bytes=95 * GIB)]
    text = page(plans)
    assert "llama2-7b on v5e-16, v5p-8<" in text
    cells = re.findall("<td>(.*?)</td>", text)
    first = cells.index("setting")
    assert cells[first : first + 8] == ["setting", "needs", "of", "", "step", "bound by", "host", "FLOPs"]
    assert "95.00 GiB" in cells
    seen = measure(text, tmp_path)
    assert seen["cut"] == 0, "a table is wider than the page"
    assert measure(page(COMPARED), tmp_path)["cut"] == 0


@needs_browser
def test_browser_errors_fail_the_test(tmp_path):
    """Make sure that the other tests can fail: a console error and a request are both detected."""
    dom, said = browse(page(COMPARED) + "<img src=missing.png><script>nowhere()</script>", tmp_path)
    assert "missing.png" in dom
    assert any("nowhere is not defined" in line for line in said)


@needs_browser
def test_a_limit_far_away_is_named_and_not_drawn(tmp_path):
    text = page([plan(limit=400.0), plan("dots", limit=400.0)])
    assert "limit 400.00 GiB →" in text
    (bar, *_) = measure(text, tmp_path)["bars"]
    assert bar["limit"] == []
    assert bar["parts"][-2][1] > 400, "bars fill the picture"


@needs_browser
def test_light_and_dark(tmp_path):
    corners = []
    for scheme in (0, 1):  # dark, light
        shot = tmp_path / f"{scheme}.png"
        flags = [f"--screenshot={shot}", f"--blink-settings=preferredColorScheme={scheme}"]
        browse(page(COMPARED), tmp_path, 800 + scheme, *flags)
        image = matplotlib.image.imread(shot)
        assert image.shape[:2] == (1500, 800 + scheme)
        colors = (255 * image[..., :3]).astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
        assert len(np.unique(colors)) > 50, "an empty page"
        corners.append(image[2, 2, :3].mean())
    assert corners[0] < 0.1
    assert corners[1] > 0.9


def test_text_is_text_and_nothing_is_fetched():
    evil = '<script>alert(1)</script><img src=x onerror="alert(2)">'
    names = {
        "config": evil,
        "target": evil,
        "settings": [evil],
        "message": evil,
        "notes": [evil],
        "versions": {evil: evil},
    }
    buffers = [{"name": evil, "group": "other", "bytes": 1, "shape": evil, "count": 1}]
    sizes = {"device_peak_bytes": 1, "host_peak_bytes": 1}
    one = plan(**names, largest=buffers, phases={evil: sizes}, zero_gradients=[{"path": evil, "bytes": 1}])
    suggested = plan(
        "none", suggestions=[{"setting": evil, "device_peak_bytes": 1, "compiled": True}], collective_bytes={evil: 1}
    )
    for text in (page([one]), page([one, suggested])):
        parsed = Text(text)
        assert not parsed.tags & {"script", "img", "onerror", "src", "srcset", "iframe", "object"}
        assert parsed.text.count(evil) >= 8
        assert "default-src 'none'" in text
        assert not re.search("https?:", text)
        assert not re.search(r"url\((?!#)|@import|@font-face", text)
        assert set(re.findall(r'href="?([^" >]+)', text)) == {"data:,"}


@pytest.mark.parametrize(
    ("one", "expected", "absent"),
    [
        (plan(limit=None), "limit unknown", 'class="verdict good"'),
        (plan(), "✓ fits, 7.15 GiB free", "≈"),
        (plan(), "8.60 GiB of 15.75 GiB on each device", "Step time"),
        (plan(estimated=True), "≈ 8.60 GiB", "✗"),
        (plan(time=TIME), "71.9k", "<script"),
        (plan(time=TIME), "a third off", "nan"),
        (NONE, "✗ does not fit, 6.85 GiB over", 'class="verdict good"'),
        (NONE, "RESOURCE_EXHAUSTED:\nUsed 22.60G", "Host memory of"),
        (plan(fits=False), ">✗ does not fit</p>", " over</p>"),  # another phase does not fit
        (plan(host=4.0), "Host memory of one process", "✗"),
        (plan(phases={}, largest=[]), "all-gather 38.00 GiB", "Peak of one device in each phase"),
        (plan(), "libtpu", "<details"),
        (plan(in_effect=IN_EFFECT), "memory.optimizer_state=<wbr>pinned_host", "memory.remat=<wbr>dots"),
        (plan(in_effect=IN_EFFECT, platform="gpu"), "memory.update=<wbr>layer_programs", "streamed"),
        (plan(breakdown={f"argument {index}": 2**20 for index in range(300)}), "280 smaller groups", "nan"),
    ],
)
def test_page_for_one_plan(one, expected, absent):
    text = page([one])
    assert expected in text
    assert absent not in text


def test_shared_facts_are_printed_once():
    text = page(COMPARED[:3])
    assert ">1 of 3 fit" in text
    assert text.count("<p class=soft>mesh.fsdp=<wbr>16</p>") == 1
    assert text.count("mesh.fsdp=16") == 3  # each plan's own table
    assert "memory.remat=<wbr>dots" in text
    assert "llama2-7b on v5e-16, llama2-7b on h200" in page([plan(), plan(target="h200")])


def test_colors_differ_for_all_color_vision_types():
    """Simulates color vision by Machado, Oliveira and Fernandes 2009, severity 1.0.

    Distances are in CIELAB (76); 10 is clearly different.
    """
    kinds = {
        "usual": np.eye(3),
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
        "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
    }
    srgb = {group: np.array([int(COLORS[group][i : i + 2], 16) / 255 for i in (1, 3, 5)]) for group in GROUPS}
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    for kind, matrix in kinds.items():
        lab = {}
        for group, color in srgb.items():
            linear = np.where(color <= 0.04045, color / 12.92, ((color + 0.055) / 1.055) ** 2.4)
            xyz = to_xyz @ np.clip(np.asarray(matrix) @ linear, 0, 1) / [0.9505, 1.0, 1.089]
            x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
            lab[group] = np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])
        for a, b in itertools.combinations(GROUPS, 2):
            assert np.linalg.norm(lab[a] - lab[b]) > 10, (kind, a, b)


def test_lanes_are_drawn_if_something_moves_to_or_from_the_host():
    lanes = {"computation": [1.0, 0.5], "from host": [0.0, 1.0], "to host": [0.25, 0.25]}
    drawn = page([plan(time=TIME | {"lanes": lanes})])
    assert "What is busy during a step" in drawn
    for name, busy in (("computation", "75%"), ("host to device", "50%"), ("device to host", "25%")):
        assert f"<title>{name}: busy {busy} of the step</title>" in drawn
    for other in (TIME, TIME | {"lanes": {"computation": [1.0]}}):
        assert "What is busy during a step" not in page([plan(time=other)])
