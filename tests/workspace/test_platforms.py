"""The lock has what each platform of the README needs, as wheels."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags, mac_platforms
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = {
    "Linux on x86-64": ("linux", "x86_64"),
    "Linux on aarch64": ("linux", "aarch64"),
    "macOS on arm64": ("darwin", "arm64"),
}
FROM_SOURCE = {"Linux on x86-64": {"antlr4-python3-runtime"}, "Linux on aarch64": {"antlr4-python3-runtime"}}
FROM_SOURCE["macOS on arm64"] = {"antlr4-python3-runtime", "megatron-core"}
"""Without a wheel: the first has no compiled code, and one C++ file of the second is compiled."""


def exported(*options: str) -> list[Requirement]:
    """What `uv sync` with these options installs, with markers."""
    program = [shutil.which("uv")] if shutil.which("uv") else [sys.executable, "-m", "uv"]
    command = [*map(str, program), "export", "--frozen", "--no-hashes", "--no-annotate", "--no-emit-workspace", "-q"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return [Requirement(line) for line in done.stdout.splitlines() if line and not line.startswith("#")]


def tags(system: str, machine: str, python: tuple[int, int]) -> Iterator[Tag]:
    """What a machine of today installs: glibc 2.34 or macOS 14."""
    if system == "darwin":
        platforms = list(mac_platforms((14, 0), machine))
    else:
        platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(34, 4, -1)]
        platforms += [f"{old}_{machine}" for old in ("manylinux2014", "manylinux2010", "manylinux1")]
    yield from cpython_tags(python, platforms=platforms)
    yield from compatible_tags(python, f"cp{python[0]}{python[1]}", platforms)


def test_cuda_python_has_no_files_of_another_package():
    """Before 12.8 it has those of cuda-bindings; since then it needs cuda-bindings instead."""
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    found = [it for it in packages if it["name"] == "cuda-python"]
    assert found
    assert all("cuda-bindings" in {other["name"] for other in it["dependencies"]} for it in found)


def test_every_extra_with_a_package_that_needs_torch_bounds_the_version_of_torch():
    packages = tomllib.loads((ROOT / "uv.lock").read_text())["package"]
    need = {it["name"] for it in packages if any(other["name"] == "torch" for other in it.get("dependencies", ()))}
    extras = {
        f"{it['name']}[{extra}]": {(other["name"], *other.get("extra", ())) for other in others}
        for it in packages
        if "editable" in it["source"]
        for extra, others in it.get("optional-dependencies", {}).items()
    }
    found = {extra: others for extra, others in extras.items() if need & {name for name, *_ in others}}
    assert "rl-ckpt-engine[nixl]" in found
    bounds = {("rl-protocol", "torch"), ("torch",)}
    assert [extra for extra, others in found.items() if not bounds & others] == []


@pytest.mark.parametrize("python", [(3, 11), (3, 12)], ids=lambda python: f"{python[0]}.{python[1]}")
@pytest.mark.parametrize("platform", PLATFORMS)
def test_every_package_of_the_everyday_tests_has_a_wheel(platform: str, python: tuple[int, int]):
    system, machine = PLATFORMS[platform]
    environment = {
        "sys_platform": system,
        "platform_system": {"linux": "Linux", "darwin": "Darwin"}[system],
        "platform_machine": machine,
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "python_version": f"{python[0]}.{python[1]}",
        "python_full_version": f"{python[0]}.{python[1]}.9",
    }
    locked = {
        (one["name"], one["version"]): [wheel["url"].rpartition("/")[2] for wheel in one.get("wheels", [])]
        for one in tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
        if "version" in one
    }
    fit = set(tags(system, machine, python))
    needed = [
        (one.name, str(one.specifier).removeprefix("=="))
        for one in exported("--group", "dev")
        if one.marker is None or one.marker.evaluate(environment)
    ]
    without = {
        name
        for name, version in needed
        if not any(fit & parse_wheel_filename(file)[3] for file in locked[name, version])
    }
    assert {"torch", "ray", "transformers", "pyzmq"} <= {name for name, _ in needed}
    assert without == FROM_SOURCE[platform]


def test_the_readme_has_every_platform():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [platform for platform in PLATFORMS if platform not in readme] == []
