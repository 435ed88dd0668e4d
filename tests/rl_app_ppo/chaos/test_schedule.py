"""The faults of a run are a function of seed and number."""

from __future__ import annotations

from rl_app_ppo.chaos.schedule import CELLS, PLACES, Fault, Pace, make_schedule
from rl_protocol.support.fault_points import FaultPoint

PACE = Pace(events=60, spread_s=0.01, passes=1.0)


def test_a_seed_gives_the_same_faults_again_and_another_seed_others():
    one, two, other = ([make_schedule(seed, number, PACE) for number in range(40)] for seed in (3, 3, 4))
    assert one == two
    assert [run.strikes for run in one] != [run.strikes for run in other]


def test_every_cell_is_struck_once_per_cycle_at_moments_that_a_run_reaches():
    runs = [make_schedule(5, number, PACE) for number in range(2 * len(PLACES))]
    for cycle in (runs[: len(PLACES)], runs[len(PLACES) :]):
        assert {(strike.victim, strike.fault) for run in cycle for strike in run.strikes if not strike.point} == {
            *CELLS
        }
        assert sorted(strike.point for run in cycle for strike in run.strikes if strike.point) == sorted(FaultPoint)
    strikes = [strike for run in runs for strike in run.strikes if not strike.point]
    assert all(1 <= strike.event < 60 for strike in strikes)
    assert all((strike.seconds > 0) == (strike.fault is Fault.STOP) for strike in strikes)
    assert all(list(run.strikes) == sorted(run.strikes, key=lambda strike: strike.event) for run in runs)
    assert {run.max_staleness for run in runs} == {0, 1}
