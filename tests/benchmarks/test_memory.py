"""The memory that `--plan` estimates is what a process takes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", ["27M", "110M"])
def test_the_estimate_of_each_role_is_within_15_percent_of_the_peak(script: Callable[..., str], size: str):
    """0.5B takes 12 GB; the published results have it.

    A processor without instructions for bfloat16 needs many times as long.
    """
    printed = script("bench_memory.py", f"--sizes={size}", "--no-publish", timeout_s=3500)
    met = re.findall(r"^ *(\w+)  \|estimate / peak memory - 1\|, (\w+), ", printed, re.MULTILINE)
    assert sorted(role for _, role in met) == ["actor", "critic", "ref"]
    assert {found for found, _ in met} <= {"aim", "must"}, printed
