"""The record of published facts: its format, and that each number occurs in the words quoted for it."""

import contextlib
import json
import re
from statistics import median

import pytest

from plimsoll.framework.families.published import load_published_models
from tools.bench import outside_record, record_page, record_results
from tools.bench.public_record import PublicFact, main, read_record
from tools.bench.record_settings import NotPlannedError, nearest_setting

FACTS = read_record()
MESH_AXES = ("pipe", "pipe_chunks", "fsdp", "model")


def names(fact: PublicFact) -> str:
    return f"{fact.line()} [{fact.source.quote}]"


def test_each_figure_is_in_its_quote():
    missing = []
    for fact in FACTS:
        digits = fact.source.quote.replace(",", "")
        for amount in (fact.peak, fact.rate):
            if amount is not None and not re.search(rf"(?<![\d.]){re.escape(f'{amount.value:.12g}')}0*(?!\d)", digits):
                missing.append(names(fact))
    assert not missing, "\n".join(missing)


def test_sources_can_be_found():
    for fact in FACTS:
        source = fact.source
        assert len(source.quote) >= 10, names(fact)
        if source.page is not None:
            assert re.match(r"https://[\w.-]+/\S+$", source.page), names(fact)
        else:
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", source.repository), names(fact)
            assert re.fullmatch(r"[0-9a-f]{40}", source.commit), names(fact)
        assert fact.differs, names(fact)
        assert fact.devices >= 1


def test_enough_facts_cover_all_verdicts_and_methods():
    assert len(FACTS) >= 50
    verdicts = [fact.verdict for fact in FACTS]
    assert min(verdicts.count(verdict) for verdict in ("fits", "out of memory", "needs")) >= 10
    assert {fact.settings.method for fact in FACTS} == {"pretrain", "full", "lora", "qlora", "adapter"}
    lines = [json.dumps([names(fact), str(fact.settings)]) for fact in FACTS]
    assert len(set(lines)) == len(lines)


def test_published_models_are_those_that_we_can_load():
    """A fact about a model that we can load can be planned: its Hub id is among the published shapes."""
    models = load_published_models()
    ids = {fact.hub_id for fact in FACTS if fact.hub_id is not None}
    assert ids <= set(models)
    assert len(ids) >= 15


def test_oom_facts_are_never_smaller_than_fitting_ones():
    """Compare facts that differ only in the batch; this finds sources that were copied wrongly."""
    setting_of = {}
    for fact in FACTS:
        rows = fact.settings.rows_per_device
        if rows is None or fact.verdict == "needs":
            continue
        rest = {**vars(fact.settings), "rows_per_device": None, "global_batch": None}
        key = str(
            (fact.model, fact.machine, fact.devices, fact.source.page, fact.source.path, sorted(rest.items(), key=str))
        )
        setting_of.setdefault(key, []).append((rows, fact.verdict))
    pairs = [runs for runs in setting_of.values() if len({verdict for _, verdict in runs}) == 2]
    assert len(pairs) >= 10
    for runs in pairs:
        fitting = max(rows for rows, verdict in runs if verdict == "fits")
        failing = min(rows for rows, verdict in runs if verdict == "out of memory")
        assert fitting < failing, runs


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"verdict": "maybe"}, "verdict = 'maybe'; expected one of fits, out of memory, needs"),
        ({"typo": 1}, "unknown field 'typo' of PublicFact"),
        ({"settings": {"method": "dpo"}}, "method = 'dpo'"),
        ({"peak": {"value": 1, "unit": "GiB", "of": "card"}}, "of = 'card'"),
        (
            {"source": {"quote": "x", "repository": "a/b"}},
            "source: expected a page, or a repository with path and commit",
        ),
    ],
)
def test_malformed_line_is_named(tmp_path, change, message):
    good = {
        "model": "m",
        "machine": "v5e",
        "devices": 1,
        "settings": {"method": "full"},
        "verdict": "fits",
        "source": {"quote": "x", "page": "https://a.b/c"},
        "differs": "",
    }
    file = tmp_path / "record.jsonl"
    file.write_text(f"{json.dumps(good)}\n{json.dumps(good | change)}\n")
    with pytest.raises(ValueError, match=rf"^record.jsonl:2: .*{re.escape(message)}"):
        read_record(file)


def test_prints_the_requested_facts(capsys):
    main(["v6e", "out of memory"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{len(lines) - 1} of {len(FACTS)} facts"
    assert len(lines) > 2
    assert all("v6e" in line and "out of memory" in line for line in lines[:-1])


def test_memory_outside_of_the_program_is_quoted_and_predicted():
    figures = outside_record.read_figures()
    assert len(figures) >= 8
    for figure in figures:
        assert re.search(rf"(?<![\d.]){re.escape(f'{figure.value:g}')}(?!\d)", figure.source.quote), figure.what
        assert re.match(r"https://github.com/[\w./-]+$", figure.source.page), figure.what
        assert figure.differs
        assert 0.75 < figure.predict() / figure.value < 1.25, figure.what
    by_slop_factor = [figure for figure in figures if figure.slop_factor is not None]
    assert all(abs(figure.predict() / figure.value - 1) < 0.011 for figure in by_slop_factor)


# --- compared to our plans -------------------------------------------------------------------------------------------


def test_nearest_setting_for_a_lora_fact(tmp_path):
    fact = next(fact for fact in FACTS if fact.machine == "RTX 4090" and fact.settings.method == "lora")
    setting = nearest_setting(fact, tmp_path)
    assert setting.config == "lora:meta-llama/Llama-3.1-8B-Instruct"
    assert setting.target == "4090"
    assert setting.overrides["model.lora.rank"] == "8"
    assert setting.overrides["memory.remat"] == "full"


def test_unsupported_settings_are_not_planned(tmp_path):
    reasons = {}
    for fact in FACTS:
        try:
            nearest_setting(fact, tmp_path)
        except NotPlannedError as error:
            reasons[fact.settings.precision] = str(error)
    assert reasons["float8 and bfloat16"] == "the stages of a pipeline are alike: 8 do not divide 126 equal repeats"


def test_pipelines_follow_the_source(tmp_path):
    """Meta's 405B has 126 layers, gpt-oss 120B 18 pairs of layers, and Qwen3 235B 94 layers: no stages are alike."""
    planned = {}
    for number, fact in enumerate(FACTS, start=1):
        if "pipeline" in (fact.settings.sharding or ""):
            with contextlib.suppress(NotPlannedError):
                planned[number] = nearest_setting(fact, tmp_path).overrides
    sizes = {number: [overrides[f"mesh.{axis}"] for axis in MESH_AXES] for number, overrides in planned.items()}
    assert sizes == {250: ["8", "5", "2", "4"], 255: ["4", "5", "2", "4"], 256: ["4", "20", "1", "2"]}
    assert [planned[number]["learner.accumulate"] for number in sizes] == ["128", "16", "32"]


def test_fp8_facts_are_planned_with_rounded_products(tmp_path):
    planned = {}
    for number, fact in enumerate(FACTS, start=1):
        if "float8" in (fact.settings.precision or ""):
            with contextlib.suppress(NotPlannedError):
                planned[number] = nearest_setting(fact, tmp_path).overrides
    assert len(planned) >= 9
    assert {overrides["model.precision"] for overrides in planned.values()} == {'{"attention|mlp": "fp8_tensor"}'}
    # Four devices share a row of 131,072 tokens.
    assert (planned[31]["data.global_batch_size"], planned[31]["mesh.seq"]) == ("2", "4")


def test_page_matches_the_results():
    results = record_results.read_results()
    page = record_results.RESULTS.with_suffix(".md").read_text()
    assert page == record_page.page(FACTS, results)


def test_enough_facts_are_planned_and_outliers_are_explained():
    rows = record_page.judge_facts(FACTS, record_results.read_results())
    sums = record_page.summary(rows)
    assert sums.planned >= 140
    assert sums.compiled >= 117
    assert sums.right >= 0.9 * sums.verdicts
    for row in [*sums.beyond, *(row for row in rows if not row.is_right)]:
        assert row.reason, row.fact.line()
    for row in sums.far_rates:
        assert row.fact.rate_differs, row.fact.line()
        assert row.fact.rate_differs in row.reason


def test_plans_for_programs_like_ours_are_close():
    """The page promises that no setting that we say fits runs out of memory, and a median peak error within 10%."""
    rows = record_page.judge_facts(FACTS, record_results.read_results())
    sums = record_page.summary([row for row in rows if record_page.is_like_ours(row.fact)])
    assert sums.planned >= 40
    assert sums.false_fits == 0
    assert sums.peaks >= 20
    assert sums.median_error <= 0.1
    assert sums.rates >= 50
    assert sums.median_rate_error <= 0.2


def test_assumed_efficiencies_hold_for_rates_they_were_not_fitted_to():
    """device_rates.py fits GeForce cards to an RTX 4090, estimated_time.py fits tpu7x to 64 chips."""
    rows = record_page.judge_facts(FACTS, record_results.read_results())
    dense = ("Llama", "Qwen3 8B")
    held_out = [row for row in rows if row.fact.machine == "RTX 5090" and row.fact.model.startswith(dense)]
    held_out += [row for row in rows if row.fact.machine == "tpu7x" and row.fact.devices > 64]
    held_out = [row for row in held_out if row.fact.settings.remat != "custom: layer inputs in host memory"]
    assert len(held_out) >= 9
    assert median(abs(row.rate_ratio - 1) for row in held_out) <= 0.15


def test_mesh_and_residuals_follow_the_source(tmp_path):
    fact = next(fact for fact in FACTS if fact.model == "MaxText 32B" and fact.machine == "v5p")
    setting = nearest_setting(fact, tmp_path)
    assert setting.target == "v5p-128"
    sizes = {path: value for path, value in setting.overrides.items() if path.startswith("mesh.")}
    assert sizes == {"mesh.data": "1", "mesh.fsdp": "16", "mesh.model": "4"}
    assert setting.overrides["memory.remat"] == "save:query,key,value,output,mlp_gate,mlp_up,mlp_down"
    assert setting.overrides["model.param_dtype"] == "float32"
    assert setting.overrides["data.global_batch_size"] == str(6 * 64)


def test_slices_and_chips_of_two_devices_follow_the_source(tmp_path):
    slices = next(fact for fact in FACTS if fact.machine == "v6e" and fact.devices == 512)
    assert nearest_setting(slices, tmp_path).target == "2xv6e-256"
    chips = next(fact for fact in FACTS if fact.machine == "tpu7x" and fact.devices == 64)
    setting = nearest_setting(chips, tmp_path)
    assert setting.target == "tpu7x-128"
    assert setting.overrides["mesh.fsdp"] == "128"
    assert setting.overrides["data.global_batch_size"] == "256"


def test_assumed_values_are_planned_but_not_like_ours(tmp_path):
    fact = next(fact for fact in FACTS if fact.settings.assumed is not None and fact.settings.seq_len is None)
    assert not record_page.is_like_ours(fact)
    setting = nearest_setting(fact, tmp_path)
    assert setting.overrides["data.seq_len"] == str(fact.settings.assumed["seq_len"])


def test_offloaded_steps_are_planned_with_their_accumulation(tmp_path):
    fact = next(
        fact for fact in FACTS if fact.settings.accumulation == 2 and "masters" in (fact.settings.offload or "")
    )
    overrides = nearest_setting(fact, tmp_path).overrides
    assert overrides["learner.accumulate"] == "2"
    assert overrides["data.global_batch_size"] == "2"


def test_idle_devices_do_not_count(tmp_path):
    fact = next(fact for fact in FACTS if fact.settings.devices_used == 1)
    assert fact.devices == 4
    assert nearest_setting(fact, tmp_path).target == "a10"


def test_loading_figures_are_not_planned(tmp_path):
    fact = next(fact for fact in FACTS if fact.not_of_the_step is not None)
    with pytest.raises(NotPlannedError, match="the peak is of loading"):
        nearest_setting(fact, tmp_path)
