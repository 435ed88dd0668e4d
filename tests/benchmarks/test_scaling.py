"""The scale model, with numbers computed by hand."""

from __future__ import annotations

import pytest
from harness.scaling import (
    GIB,
    Costs,
    Gpu,
    Sample,
    Spread,
    compute_s,
    fit,
    gain_bar_percent,
    gain_percent,
    network_s,
    spread,
)
from ppo_step.payloads import FAMILIES
from ppo_step.scale_model import PUBLISHED, calls, predicted, spreads, validated, volume


def test_seconds_of_one_node():
    costs = Costs(op_s=0.01, serial_s=2.0, parallel_s=8.0)
    assert costs.seconds(nbytes=3, ops=10, lanes=4) == pytest.approx(0.1 + 3 * (2 + 2))


def test_fit_finds_the_costs_it_was_made_from():
    made = Costs(op_s=0.01, serial_s=2.0, parallel_s=8.0)
    samples = [Sample(made.seconds(n, 20, 4), 0.05 + 2.0 * n, n, 20, 4) for n in (1, 3, 5)]
    found = fit(samples)
    assert (found.op_s, found.serial_s, found.parallel_s) == pytest.approx((0.01, 2.0, 8.0))


def test_small_steps_count_as_much_as_large_ones():
    # 1 s for 1 byte, 4 s for 2: b = (1 + 1/2) / (1 + 1/4) minimises (b - 1)^2 + (b/2 - 1)^2; a
    #                            comes out negative and is 0.
    found = fit([Sample(1.0, 1e-9, 1, 5, 2), Sample(4.0, 1e-9, 2, 5, 2)])
    assert found.op_s == 0
    assert found.parallel_s == pytest.approx(2 * 1.2, rel=1e-6)


def test_a_fit_never_has_negative_costs():
    found = fit([Sample(1.0, 0.9, 10, 5, 2), Sample(0.5, 0.1, 20, 5, 2)])
    assert found.parallel_s == found.serial_s == 0
    assert found.op_s == pytest.approx(0.12)  # (5 + 10) / (25 + 100)
    more_cpu_than_time = fit([Sample(1.0, 1.0, 10, 5, 2), Sample(2.0, 5.0, 20, 5, 2)])
    assert (more_cpu_than_time.serial_s, more_cpu_than_time.parallel_s) == (pytest.approx(0.1), 0.0)


def test_a_fit_needs_growing_bytes_and_one_worker_count():
    one = Sample(1.0, 0.1, 10, 5, 2)
    for other in (one, Sample(2.0, 0.1, 20, 6, 2), Sample(2.0, 0.1, 20, 5, 1)):
        with pytest.raises(ValueError, match="one worker count"):
            fit([one, other])


def test_network_by_hand():
    assert network_s(8 * GIB, nodes=4, nic_gib_s=2.0, through_one=True) == pytest.approx(3.0)  # 6 of 8 GiB at 2 GiB/s
    assert network_s(8 * GIB, nodes=4, nic_gib_s=2.0, through_one=False) == pytest.approx(0.75)
    assert network_s(8 * GIB, nodes=1, nic_gib_s=2.0, through_one=True) == 0


def test_compute_by_hand():
    gpu = Gpu(active_params=1e9, flops=1e14, passes=5, decode_tokens_s=1000, sequence_tokens_s=50)
    training = 100 * 400 * 2 * 1e9 * 5 / (1e14 * 4)
    assert compute_s(gpu, 4, rows=100, prompt=100, response=300, longest=400) == pytest.approx(
        training + 8.0
    )  # 400 / 50
    assert compute_s(gpu, 4, rows=1000, prompt=100, response=300, longest=400) == pytest.approx(10 * training + 75)


def test_gain_by_hand():
    assert gain_percent(compute=80, before=20, after=0) == 25
    assert gain_percent(compute=0, before=10, after=1) == pytest.approx(900)
    assert gain_percent(compute=10, before=1, after=1) == 0


def test_the_error_bar_by_hand():
    # predicted 0.8 and 1.25 times what was measured: what was measured is 1.25 and 0.8 times what
    # was predicted
    assert spread([-20.0, 25.0]) == Spread(pytest.approx(0.8), pytest.approx(1.25))
    # 100 * ((80 + 20) / 80 - 1) = 25; with transfers of 10 to 30 s the gain is 12.5 to 37.5
    assert gain_bar_percent(80, 20, 0, Spread(0.5, 1.5), Spread(1, 1)) == pytest.approx(50)
    # (80 + 20) / (80 + 4 * 2) is 13.6 % instead of (80 + 20) / (80 + 4), 19 %
    assert gain_bar_percent(80, 20, 4, Spread(1, 1), Spread(1, 2)) == pytest.approx(100 * (1 - (12 / 88) / (16 / 84)))
    assert gain_bar_percent(80, 0, 0, Spread(0.5, 2), Spread(0.5, 2)) == 0


def test_nothing_is_predicted_with_an_error_bar_above_a_fifth():
    costs = {"driver": Costs(0.0, 1e-9, 0.0), "simple": Costs(0.0, 0.0, 0.0)}
    exact = Spread(1.0, 1.0)
    near = predicted(costs, {"driver": Spread(0.81, 1.1), "simple": exact}, PUBLISHED[3], nic_gib_s=1e9)
    assert near["error_bar_percent"] == pytest.approx(19, rel=1e-3)
    assert near["prediction"] == f"{near['gain_percent']:.3g} (error bar 19 %)"
    far = predicted(costs, {"driver": Spread(0.79, 1.1), "simple": exact}, PUBLISHED[3], nic_gib_s=1e9)
    assert far["prediction"] == "not predicted: error bar 21 %"
    assert far.keys().isdisjoint({"gain_percent", "driver_transfer_s", "ours_transfer_s", "step_s"})


def test_volume_and_calls_by_hand():
    # written: prompts, responses, mask, rollout log-probs; a run [version, tokens]; old log-probs
    # and entropy; reference.
    # Read: by three model stages.
    text, p, r = FAMILIES["text"], 2048, 8192
    writes = 8 * p + (8 + 1 + 4) * r + 2 * 4 + (4 + 4) * r + 4 * r
    reads = 3 * 8 * p + 2 * 8 * r + (8 + 1 + 4 + 4 + 4) * r
    assert volume(text, 10) == 10 * (writes + reads)
    assert volume(text, 10, extra_bytes=100) == 10 * (writes + reads) + 400
    assert calls(4) == 4 * 4 + 3


def row(plane: str, mib: float, rows: int, wall: float, cpu: float, workers: int = 4) -> dict[str, object]:
    return {
        "plane": plane,
        "family": "text",
        "layout": "padded",
        "compute": "none",
        "mib": mib,
        "rows_per_step": rows,
        "workers": workers,
        "step_s": wall,
        "driver_cpu_s": cpu,
    }


def test_every_point_is_predicted_without_itself():
    rows = [
        row(p, mib, n, s, 1e-6)
        for p in ("driver", "simple")
        for mib, n, s in ((1, 16, 1.0), (2, 32, 2.0), (4, 64, 4.0))
    ]
    rows += [row("simple", 2, 32, 4.0, 1e-6, workers=1)]
    costs, checked = validated(rows, cores=2)
    assert costs["driver"].op_s == pytest.approx(0, abs=1e-9)
    assert [(r["predicted_s"], round(r["error_percent"], 3)) for r in checked[:6]] == [(1, 0), (2, 0), (4, 0)] * 2
    assert checked[6]["predicted_s"] == pytest.approx(4.0, rel=1e-3)  # half the lanes
    assert spreads(checked) == {plane: Spread(pytest.approx(1), pytest.approx(1)) for plane in ("driver", "simple")}
    with pytest.raises(ValueError, match="three sizes"):
        validated(rows[:2], cores=2)


def test_a_prediction_gains_only_what_transfer_there_is():
    free = Costs(0.0, 0.0, 0.0)
    sure = {"driver": Spread(1.0, 1.0), "simple": Spread(1.0, 1.0)}
    row = predicted({"driver": free, "simple": free}, sure, PUBLISHED[0], nic_gib_s=1e9)
    assert row["gain_percent"] == pytest.approx(0, abs=1e-3)
    dear = Costs(0.0, 1e-9, 0.0)
    gains = [predicted({"driver": dear, "simple": free}, sure, run, nic_gib_s=10)["gain_percent"] for run in PUBLISHED]
    assert min(gains) > 0
    assert gains[3] > gains[2]  # the same batch on eight times the nodes: less compute, the same driver
    assert [run.gain for run in PUBLISHED] == [14.1, 12.5, 22.4, 49.2, 7.0, 20.0]
