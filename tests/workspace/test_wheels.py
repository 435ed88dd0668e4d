"""Every wheel installs and imports alone, because uv ignores ranges between workspace members."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from email.parser import Parser
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LIGHT = ["rl-protocol", "rl-transferqueue", "rl-ckpt-engine", "rl-rollout-vllm", "rl-megatron-peft", "rl-trainer"]
HEAVY = ["torch", "tensordict", "ray", "vllm", "megatron", "transformers"]
APPS = ["rl-app-ppo", "rl-stack", "rl-docs"]


def uv(*arguments: str | Path, cwd: Path) -> str:
    """Run uv outside of the workspace, without its overrides and sources."""
    program = [shutil.which("uv")] if shutil.which("uv") else [sys.executable, "-m", "uv"]
    environment = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "UV_PROJECT")}
    command = [str(part) for part in [*program, *arguments]]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution name -> built wheel."""
    out = tmp_path_factory.mktemp("wheels")
    uv("build", "--all-packages", "--wheel", "-o", out, cwd=ROOT)
    return {path.name.split("-")[0].replace("_", "-"): path for path in sorted(out.glob("*.whl"))}


def metadata(wheel: Path) -> list[str]:
    """The Requires-Dist lines of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []


def siblings(name: str, wheels: dict[str, Path]) -> list[str]:
    """Members the base install of `name` needs."""
    found: list[str] = []
    for line in metadata(wheels[name]):
        other = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]
        if other in wheels and other != name and "extra ==" not in line and other not in found:
            found += [other, *(deeper for deeper in siblings(other, wheels) if deeper not in found)]
    return found


def install(into: Path, name: str, wheels: dict[str, Path], *options: str) -> Path:
    """A clean environment with one package; siblings come from local files, not from an index."""
    environment = into / "venv"
    uv("venv", "--python", sys.executable, environment, cwd=into)
    python = environment / "bin" / "python"
    needed = [] if "--no-deps" in options else siblings(name, wheels)
    paths = [wheels[n] for n in (name, *needed)]
    uv("pip", "install", "--python", python, "--find-links", wheels[name].parent, *options, *paths, cwd=into)
    return python


def run(python: Path, code: str, cwd: Path) -> str:
    done = subprocess.run([python, "-I", "-c", code], cwd=cwd, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_every_member_has_a_wheel_with_types_and_nothing_else(wheels: dict[str, Path]):
    assert sorted(wheels) == sorted([*LIGHT, *APPS])
    for name, wheel in wheels.items():
        package = name.replace("-", "_")
        with zipfile.ZipFile(wheel) as archive:
            files = archive.namelist()
        assert f"{package}/py.typed" in files
        assert f"{package}-{version(name)}.dist-info/licenses/LICENSE" in files
        assert {f.split("/")[0] for f in files} == {package, f"{package}-{version(name)}.dist-info"}


def version(name: str) -> str:
    folder = next(p for p in (*ROOT.glob("packages/*"), *ROOT.glob("apps/*")) if _name(p) == name)
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]["version"]


def _name(folder: Path) -> str | None:
    file = folder / "pyproject.toml"
    return tomllib.loads(file.read_text())["project"]["name"] if file.is_file() else None


def test_metadata_bounds_siblings(wheels: dict[str, Path]):
    seen = 0
    for name, wheel in wheels.items():
        for line in metadata(wheel):
            other = re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]
            if other in wheels and other != name:
                major, minor, *_ = version(other).split(".")
                assert f"<{major}.{int(minor) + 1},>={major}.{minor}" in line, f"{name}: {line}"
                seen += 1
    assert seen >= len(wheels)


@pytest.mark.parametrize("name", LIGHT)
def test_a_package_installs_and_imports_alone(name: str, wheels: dict[str, Path], tmp_path: Path):
    python = install(tmp_path, name, wheels)
    uv("pip", "check", "--python", python, cwd=tmp_path)
    package = name.replace("-", "_")
    code = f"import sys, {package}; print(sorted(set({HEAVY}) & set(sys.modules)), {package}.__file__)"
    loaded, _, place = run(python, code, tmp_path).rpartition(" ")
    assert loaded == "[]"
    assert Path(place).is_relative_to(tmp_path)
    installed = uv("pip", "freeze", "--python", python, cwd=tmp_path)
    assert not [line for line in installed.splitlines() if re.match(rf"({'|'.join(HEAVY)})\b", line)]


@pytest.mark.parametrize("name", APPS)
def test_an_app_resolves_against_the_wheels(name: str, wheels: dict[str, Path], tmp_path: Path):
    """Resolve the app's heavy dependencies against the built siblings; install the app alone.

    Its entry points are found among its files, because importing it takes its dependencies.
    """
    names: Sequence[str] = (name, *siblings(name, wheels))
    (tmp_path / "app.in").write_text("".join(f"{n} @ {wheels[n].as_uri()}\n" for n in names))
    plan = uv("pip", "compile", "--python-version", "3.11", "--no-header", "--no-annotate", "app.in", cwd=tmp_path)
    assert re.search(r"^torch==2\.13\.", plan, re.MULTILINE)
    assert re.search(r"^ray==2\.60\.", plan, re.MULTILINE)
    python = install(tmp_path, name, wheels, "--no-deps")
    code = (
        "import importlib.metadata as m\n"
        f"d = m.distribution({name!r})\n"
        "files = {str(file) for file in d.files}\n"
        f"modules = [{name.replace('-', '_')!r}, *(e.module for e in d.entry_points)]\n"
        "places = {n: {n.replace('.', '/') + end for end in ('.py', '/__init__.py')} for n in modules}\n"
        "print(d.version, [n for n in modules if not places[n] & files])"
    )
    assert run(python, code, tmp_path) == f"{version(name)} []"
