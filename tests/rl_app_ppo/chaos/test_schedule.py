"""The faults of a run are a function of seed and number."""

from __future__ import annotations

from collections import Counter

from rl_app_ppo.chaos.schedule import APP_CELLS as CELLS
from rl_app_ppo.chaos.schedule import NOT_KILLED_AT, PLANE_CELLS, Fault, Pace, make_schedule
from rl_protocol.support.fault_points import FaultPoint

PACE = Pace(events=60, spread_s=0.01, passes=1.0, cells=CELLS)
PLANE = Pace(events=60, spread_s=0.01, passes=1.0, cells=PLANE_CELLS)
CYCLES = 4


def test_a_seed_gives_the_same_faults_again_and_another_seed_others():
    one, two, other = ([make_schedule(seed, number, PACE) for number in range(40)] for seed in (3, 3, 4))
    assert one == two
    assert [run.strikes for run in one] != [run.strikes for run in other]


def test_every_cell_is_struck_in_each_cycle_at_moments_that_a_run_reaches():
    runs = [make_schedule(5, number, PACE) for number in range(CYCLES * len(CELLS))]
    for start in range(0, len(runs), len(CELLS)):
        cycle = runs[start : start + len(CELLS)]
        assert {(strike.victim, strike.fault) for run in cycle for strike in run.strikes} == {*CELLS}
    strikes = [strike for run in runs for strike in run.strikes]
    assert all(1 <= strike.event < 60 for strike in strikes if not strike.point)
    lasting = (Fault.STOP, Fault.SLOW_DISK, Fault.SLOW_LINK, Fault.CLOCK)
    assert all(
        (strike.seconds > 0) == (strike.fault in lasting) for strike in strikes if strike.fault is not Fault.FULL_DISK
    )
    assert {strike.seconds > 0 for strike in strikes if strike.fault is Fault.FULL_DISK} == {True, False}
    assert all(list(run.strikes) == sorted(run.strikes, key=lambda strike: strike.event) for run in runs)
    assert {run.max_staleness for run in runs} == {0, 1}


def test_some_cycles_kill_a_process_at_every_point_and_slow_every_sync():
    runs = [make_schedule(5, number, PACE) for number in range(CYCLES * len(CELLS))]
    at = Counter((strike.fault, strike.point) for run in runs for strike in run.strikes if strike.point)
    assert {point for fault, point in at if fault is Fault.KILL} == {*FaultPoint} - {*NOT_KILLED_AT}
    assert sum(count for (fault, _), count in at.items() if fault is Fault.SLOW_DISK) == 3 * CYCLES
    assert {point for fault, point in at if fault is Fault.CLOCK} == {FaultPoint.LEASE_CLOCK_READ}
    assert {point for fault, point in at if fault is Fault.FLIP_WEIGHTS} == {FaultPoint.WEIGHTS_SENT}
    assert {point for fault, point in at if fault is Fault.FLIP_MEMORY} == {FaultPoint.ROWS_IN_MEMORY}
    only_at = {Fault.FLIP_WEIGHTS, Fault.FLIP_MEMORY, Fault.CLOCK}
    assert {fault for fault, _ in at} == {Fault.KILL, Fault.SLOW_DISK, *only_at}


def test_runs_without_a_model_never_wait_for_weights_that_are_not_sent():
    runs = [make_schedule(5, number, PLANE) for number in range(CYCLES * len(PLANE_CELLS))]
    points = {strike.point for run in runs for strike in run.strikes}
    assert points == {None, *FaultPoint} - {FaultPoint.WEIGHTS_SENT}


def test_every_cell_is_struck_in_both_modes_within_two_cycles():
    for start in (0, 2 * len(CELLS)):
        runs = [make_schedule(5, start + number, PACE) for number in range(2 * len(CELLS))]
        struck = {(one.victim, one.fault, run.max_staleness) for run in runs for one in run.strikes}
        assert struck == {(*cell, mode) for cell in CELLS for mode in (0, 1)}


def test_the_application_has_each_cell_three_times_in_as_many_cycles():
    strikes = [strike for number in range(3 * len(CELLS)) for strike in make_schedule(22, number, PACE).strikes]
    runs = Counter((strike.victim, strike.fault) for strike in strikes)
    assert min(runs[cell] for cell in CELLS) >= 3
