"""Every view of the report in headless Chromium (Debian's package `chromium`)."""

from __future__ import annotations

import asyncio

import pytest
from chromium import find_chromium, page
from hostile_run import write_run

from rl_app_ppo.report.page import write_report

PROGRAM = find_chromium() or ""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PROGRAM, reason="NO VIEW OF THE REPORT IS TESTED: chromium is not installed (apt-get install chromium)"
    ),
]
VIEWS = {
    "#overview": "Time per stage of a step",
    "#curves": "Accuracy",
    "#curves?q=score": "critic/score/mean",
    "#timeline": "while others compute",
    "#timeline?from=9&to=14": "Share of the time in training",
    "#samples": "96 trajectories",
    "#samples?step=2&sort=reward&why=wrong": "8 trajectories",
    "#samples?q=onerror": "trajectories",
    "#samples?step=99": "No trajectory fits",
    "#group/2/s2-1": "4 responses, mean reward 0.5",
    "#sample/2/s2-1%2F0%2F0": "observation 1 token ",
    "#sample/2/s2-1%2F0%2F0?by=log_prob": "largest gap\n0.5",  # that of the observation is larger
    "#sample/2/s2-1%2F0%2F0?by=gap": "trainer's log-prob minus rollout's",
    "#sample/2/s2-1%2F0%2F0?by=version": "version of the weights",
    "#sample/9/none": "was not recorded",
    "#compare": "Prompts that both runs recorded",
    "#config": "Configuration of a",
    "#nonsense/%E0%A4%A": "Time per stage of a step",
}


async def look(file, views, *, dark=False, width=1280):
    """The text of each view, and what the browser complained of."""
    async with page(PROGRAM, width=width) as tab:
        await tab.theme("dark" if dark else "light")
        await tab.open(file.as_uri())
        shown = {}
        for view in views:
            await tab.show(view)
            shown[view] = await tab.evaluate("document.body.innerText")
            wide = await tab.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{view} is {wide} pixels too wide at {width}"
        assert not await tab.evaluate("'pwned' in window")
        assert [url for url in tab.requests if not url.startswith("file://")] == []
        return shown, tab.problems


@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 400)])
def test_every_view_opens_by_its_hash_without_an_error(tmp_path, dark, width):
    runs = [write_run(tmp_path / "a", outcome="failed"), write_run(tmp_path / "b")]
    write_report(runs, tmp_path / "report.html")
    shown, problems = asyncio.run(look(tmp_path / "report.html", VIEWS, dark=dark, width=width))
    assert problems == []
    for view, text in VIEWS.items():
        assert text in shown[view], view
    assert "The run failed" in shown["#overview"]
    assert "<svg onload=window.pwned=1>" in shown["#overview"]  # as text
    assert "\u27e8U+202E\u27e9right to left" in shown["#overview"]
    assert "\u202e" not in "".join(shown.values())


def test_the_gap_by_position_has_a_curve_for_each_quarter_of_a_response(tmp_path):
    write_report([write_run(tmp_path / "a", texts=("t",))], tmp_path / "report.html")

    async def work():
        async with page(PROGRAM) as tab:
            await tab.open((tmp_path / "report.html").as_uri())
            await tab.show("#curves")
            chart = (
                "[...document.querySelectorAll('figure')].find((one) => one.innerText.startsWith('Gap by position'))"
            )
            await tab.wait_for(f"{chart}.querySelector('canvas')")
            return await tab.evaluate(f"{chart}.querySelector('.legend').innerText"), tab.problems

    shown, problems = asyncio.run(work())
    last = ["first quarter of the response 0.125", "second 0.25", "third 0.375", "last 0.5", "last"]
    assert (shown.split("\n"), problems) == (last, [])


def test_clicks_and_keys_lead_from_a_curve_to_a_token(tmp_path):
    write_report([write_run(tmp_path / "a", texts=("one ", "two ", "three "))], tmp_path / "report.html")

    async def work():
        async with page(PROGRAM) as tab:
            await tab.open((tmp_path / "report.html").as_uri())
            press = "dispatchEvent(new KeyboardEvent('keydown', {key: KEY, bubbles: true}))"
            for key, view in (("2", "#curves"), ("3", "#timeline"), ("4", "#samples"), ("1", "#overview")):
                await tab.evaluate(press.replace("KEY", f"'{key}'"))
                await tab.wait_for(f"location.hash.startsWith('{view}')")
            await tab.wait_for("document.querySelector('.u-over')")
            box = await tab.evaluate(
                "(() => { const r = document.querySelector('.u-over').getBoundingClientRect();"
                " return [r.left + r.width / 2, r.top + r.height / 2] })()"
            )
            for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
                await tab.send("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)
            await tab.wait_for("location.hash.startsWith('#samples?step=')")
            await tab.wait_for("document.querySelector('a.row')")
            await tab.evaluate("document.querySelector('a.row').click()")
            await tab.wait_for("document.querySelector('.tok')")
            first = await tab.evaluate("location.hash")
            await tab.evaluate(press.replace("KEY", "']'"))
            await tab.wait_for(f"location.hash !== {first!r} && document.querySelectorAll('.tok').length === 3")
            assert await tab.evaluate(
                "[...document.querySelectorAll('.turn b')].map((one) => one.textContent).join()"
            ) == ("turn 1,observation,turn 2")
            await tab.evaluate("document.querySelector('.turn:not([open]) summary').click()")
            await tab.wait_for("document.querySelectorAll('.tok').length === 4")
            await tab.evaluate(
                "document.querySelector('.tok').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))"
            )
            assert "log-prob" in await tab.evaluate("document.querySelector('.readout').innerText")
            before = await tab.evaluate("getComputedStyle(document.body).backgroundColor")
            await tab.evaluate(press.replace("KEY", "'t'"))
            assert await tab.evaluate("getComputedStyle(document.body).backgroundColor") != before
            return tab.problems

    assert asyncio.run(work()) == []


def test_a_hundred_steps_of_512_trajectories_fit_in_3_mb_and_open(tmp_path):
    run = write_run(tmp_path / "a", steps=100, count=512, texts=tuple("0123456789+="))
    assert write_report([run], tmp_path / "report.html") < 3_000_000

    async def work():
        async with page(PROGRAM) as tab:
            await tab.open((tmp_path / "report.html").as_uri())
            await tab.show("#samples?sort=gap")
            assert "51,200 trajectories" in await tab.evaluate("document.body.innerText")
            assert await tab.evaluate("document.querySelectorAll('a.row').length") < 100
            return tab.problems

    assert asyncio.run(work()) == []
