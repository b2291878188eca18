"""Metrics: the specification's names, sums and layers that agree, and a text that Prometheus reads."""

from __future__ import annotations

import pytest
from tiny import write_hf
from tiny_factors import write_pack

import ralo
from ralo import KWTA, TT, Event, Mix, Proc, StatePack, metrics
from ralo.cli import main

MIXED = {"mix.enabled", "mix.mem_ratio"}
SPECIFIED = {"kwta.keep_ratio", "kwta.duty_hits", "kwta.temp", "kwta.flicker", "kwta.bytes_skipped"}
SPECIFIED |= {"pack.enabled", "pack.mode", "pack.density", "pack.active", "pack.popcnt"}
SPECIFIED |= {"event.enabled", "event.budget_ms_used", "event.quorum_hits", "event.topk_kept", "event.quality_gap"}
SPECIFIED |= {"event.stale_pct", "proc.fanout_effective", "proc.trims", "proc.mem_ratio", "proc.base_scale"}
SPECIFIED |= {"tt.enabled", "tt.rank", "tt.gap", "tt.speedup", "tt.mem_saved"}


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    """With every mode that there is."""
    folder = tmp_path_factory.mktemp("metrics")
    tiny, text = write_hf(folder / "tiny", "llama", eos_token_id=None), folder / "text"
    text.write_text("the house was old and the people were few " * 100)
    assert (
        main(
            [
                "pack",
                "-m",
                str(tiny),
                "-o",
                str(folder / "pack"),
                "--proc-sparse=on",
                "--text",
                str(text),
                "--tokens",
                "512",
            ]
        )
        == 0
    )
    proc = Proc(pack=str(folder / "pack"))
    tt = TT(pack=str(write_pack(tiny, folder / "factors", kinds={"o": "rest"})), target="attn")
    lm = ralo.load(tiny, modes=[proc, tt, StatePack(), KWTA(k=0.5), Event(target="attn", budget_ms=1000)])
    lm.generate("the house", max_tokens=30, temperature=0)
    return lm


def test_names(lm):
    assert set(metrics.NAMES) >= SPECIFIED
    found = {name for name in lm.metrics() if "." in name}
    assert found == set(metrics.NAMES) - MIXED
    assert all(metrics.NAMES.values())


def test_names_of_a_backend_that_cannot_stand_beside_the_others(tmp_path):
    lm = ralo.load(write_hf(tmp_path / "tiny", "llama"), modes=[Mix(target="mlp")])
    found = {name for name in lm.metrics() if "." in name and not name.startswith("guard.")}
    assert found == MIXED
    assert lm.metrics()["mix.enabled"] == 2 * lm.model.cfg.n_layers and 0.5 < lm.metrics()["mix.mem_ratio"] < 0.6


def test_layers_add_up(lm):
    whole, layers = lm.metrics(), lm.layer_metrics()
    for name in ("kwta.bytes_skipped", "kwta.duty_hits"):
        assert sum(layer[name] for layer in layers) == whole[name]
    for name in ("tt.enabled", "tt.mem_saved"):
        assert sum(layer[name] for layer in layers) == whole[name] != 0
    ratios = [layer["kwta.keep_ratio"] for layer in layers]
    assert min(ratios) <= whole["kwta.keep_ratio"] <= max(ratios)


def test_dense_has_none(tmp_path):
    lm = ralo.load(write_hf(tmp_path / "tiny", "llama"))
    assert not any("." in name for name in lm.metrics()) and lm.layer_metrics() == [{}, {}]


def test_prometheus(lm):
    parser = pytest.importorskip("prometheus_client.parser", reason="Prometheus text is made by prometheus_client")
    families = {f.name: f for f in parser.text_string_to_metric_families(metrics.prometheus(lm.model, lm.guard))}
    shown = {name.replace(".", "_") for name in set(metrics.NAMES) - MIXED}
    assert shown == {name.removeprefix("ralo_") for name in families}
    skipped = families["ralo_kwta_bytes_skipped"]
    assert skipped.documentation == metrics.NAMES["kwta.bytes_skipped"]
    by_layer = {s.labels["layer"]: s.value for s in skipped.samples}
    assert by_layer["all"] == by_layer["0"] + by_layer["1"] == lm.metrics()["kwta.bytes_skipped"]
