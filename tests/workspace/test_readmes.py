"""Every code block of every README and docs page is valid, and a test runs every Python block."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import textwrap
import tomllib
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from kept_runs import keep_run
from safetensors.numpy import save_file
from typer.testing import CliRunner

from rl_app_ppo.cli.main import main
from rl_app_ppo.cli.rl import app
from rl_trainer.record.record_file import RecordFile
from rl_trainer.record.record_rows import EndRow

ROOT = Path(__file__).resolve().parents[2]
READMES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "packages/*/README.md",
        "packages/*/docs/*.md",
        "apps/*/README.md",
        "apps/*/docs/*.md",
        "benchmarks/README.md",
    )
    for path in ROOT.glob(pattern)
)
SNIPPET = re.compile(r'--8<-- "((?:packages|apps)/[\w-]+/examples/\w+\.py)"\n')
"""A block that shows a program, which test_examples.py runs."""
RUN_BY = {
    ("apps/ppo/docs/runs.md", 0): "tests/rl_app_ppo/outputs/test_metric_sinks.py::test_the_logger_of_the_page",
    ("docs/guides/data_plane.md", 0): "tests/rl_transferqueue/test_backends.py::installed",
    (
        "docs/guides/python.md",
        0,
    ): "tests/integration/interfaces/test_python_api.py::test_the_example_of_the_guide_trains",
    ("docs/guides/reward.md", 0): "tests/workspace/test_readmes.py::test_the_reward_of_the_guide",
    (
        "docs/guides/rollout_engine.md",
        0,
    ): "tests/integration/rollout/test_rollout_plugin.py::test_the_example_of_the_guide_generates",
    (
        "docs/guides/weight_engine.md",
        0,
    ): "tests/rl_ckpt_engine/scenarios/test_example_engine.py::test_the_guide_tests_it_so",
    ("packages/rl-ckpt-engine/README.md", 0): "tests/rl_ckpt_engine/scenarios/test_readme.py::test_example_runs",
    (
        "packages/rl-ckpt-engine/docs/extending.md",
        0,
    ): "tests/rl_ckpt_engine/scenarios/test_readme.py::test_a_registered_engine",
    ("packages/rl-megatron-peft/README.md", 0): "tests/rl_megatron_peft/scenarios/test_readme.py::test_adapter_folder",
    ("packages/rl-megatron-peft/README.md", 1): "tests/rl_megatron_peft/scenarios/test_readme.py::test_a_policy",
    ("packages/rl-megatron-peft/README.md", 2): "tests/rl_megatron_peft/scenarios/test_readme.py::test_a_critic",
    ("packages/rl-protocol/README.md", 0): "tests/workspace/test_readmes.py::test_the_vocabulary",
    ("packages/rl-rollout-vllm/README.md", 0): "tests/rl_rollout_vllm/scenarios/test_readme.py::test_example_runs",
    (
        "packages/rl-trainer/README.md",
        0,
    ): "tests/rl_trainer/driver/test_trainer.py::test_the_example_of_the_readme_trains",
    ("packages/rl-trainer/docs/agents.md", 0): "tests/rl_trainer/scenarios/test_readme.py::test_a_tool",
    (
        "packages/rl-trainer/docs/agents.md",
        1,
    ): "tests/rl_trainer/scenarios/test_readme.py::test_a_session_of_two_trajectories",
    ("packages/rl-trainer/docs/agents.md", 2): "tests/rl_trainer/scenarios/test_readme.py::test_an_endpoint",
    ("packages/rl-trainer/docs/data.md", 0): "tests/rl_trainer/scenarios/test_readme.py::test_a_curriculum",
    ("packages/rl-trainer/docs/running.md", 0): "tests/rl_trainer/scenarios/test_readme.py::test_a_hook",
    (
        "packages/rl-trainer/docs/rewards.md",
        0,
    ): "tests/rl_trainer/scenarios/test_readme.py::test_forms_of_a_reward_function",
    (
        "packages/rl-transferqueue/README.md",
        0,
    ): "tests/rl_transferqueue/scenarios/test_package.py::test_readme_examples_run",
    (
        "packages/rl-transferqueue/README.md",
        1,
    ): "tests/rl_transferqueue/scenarios/test_package.py::test_readme_examples_run",
    (
        "packages/rl-transferqueue/docs/durable.md",
        0,
    ): "tests/rl_transferqueue/scenarios/test_package.py::test_readme_examples_run",
    (
        "packages/rl-transferqueue/docs/streaming.md",
        0,
    ): "tests/rl_transferqueue/scenarios/test_package.py::test_readme_examples_run",
}
"""(README, number of its python block) -> the test that runs the block."""


THEIR_KEYS = {
    *("actor.prox_logp_method", "data.max_response_length", "model.lora_rank", "rollout.max_head_offpolicyness"),
}
"""Keys of verl and AReaL in groups that have our names."""


class Block(NamedTuple):
    readme: str
    line: int
    language: str
    code: str


def blocks_of(path: Path) -> list[Block]:
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    found = re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, flags=re.DOTALL | re.MULTILINE)
    return [Block(name, text[: m.start()].count("\n") + 1, m[2], textwrap.dedent(m[3])) for m in found]


BLOCKS = [block for path in READMES for block in blocks_of(path)]


def commands(program: str = " apps/ppo") -> list[tuple[str, list[str]]]:
    """(place, words after the program's name) of each command line that starts it."""
    found: list[tuple[str, list[str]]] = []
    for block in BLOCKS:
        if block.language not in ("", "sh", "bash"):
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            _, started, rest = line.partition(program)
            if started and "uv run" in line:
                found.append((f"{block.readme}: {line.strip()}", shlex.split(rest, comments=True)))
    return found


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and not SNIPPET.fullmatch(block.code)]


def place(block: Block) -> str:
    return f"{block.readme}:{block.line}"


@pytest.mark.parametrize("block", of("python"), ids=place)
def test_python_compiles(block: Block):
    ast.parse(block.code)


def test_every_python_block_has_a_test_that_runs_it():
    counts = Counter(block.readme for block in of("python"))
    assert sorted(RUN_BY) == sorted((readme, number) for readme, count in counts.items() for number in range(count))
    for test in RUN_BY.values():
        file, _, function = test.partition("::")
        assert f"def {function}(" in (ROOT / file).read_text(encoding="utf-8"), test


def test_a_snippet_shows_an_example():
    shown = [found[1] for block in BLOCKS if (found := SNIPPET.fullmatch(block.code))]
    assert shown
    assert [path for path in shown if not (ROOT / path).is_file()] == []


def test_every_command_of_the_site_is_one_that_a_test_runs():
    """Or it installs or downloads something; the programs of the rest are checked here by name."""
    known = re.compile(r"uv run (--extra \S+ )*(apps/ppo|apps/docs|rl |hf download |python -m rl_app_ppo\.)")
    lines = [
        (place(block), line)
        for block in BLOCKS
        if block.readme.startswith(("docs/", "apps/ppo/docs/")) and block.language == ""
        for line in block.code.replace("\\\n", " ").splitlines()
    ]
    assert len(lines) > 20
    assert [line for line in lines if not known.match(line[1])] == []


@pytest.mark.parametrize("block", of("json"), ids=place)
def test_json_is_a_row_of_data(block: Block):
    """Or a file of MCP servers, which test_mcp.py reads."""
    keys = set(json.loads(block.code))
    assert {"prompt", "reward_model"} <= keys or keys == {"mcpServers"}


@pytest.mark.parametrize("block", of("toml"), ids=place)
def test_toml_parses(block: Block):
    assert tomllib.loads(block.code)


def test_the_readme_of_a_member_is_short():
    """It has what a reader of the package index needs; more belongs in a page of the site."""
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in ROOT.glob("*/*/README.md")}
    assert len(lines) > 8
    assert {path.relative_to(ROOT).as_posix(): count for path, count in lines.items() if count > 120} == {}


@pytest.mark.parametrize("readme", sorted(ROOT.glob("packages/*/README.md")), ids=lambda path: path.parts[-2])
def test_a_readme_of_a_member_installs_what_its_programs_import(readme: Path):
    text = readme.read_text(encoding="utf-8")
    project = tomllib.loads((readme.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"pip install '?([\w-]+)", text) + [re.split(r"[^\w-]", it)[0] for it in project["dependencies"]]
    imported = re.findall(r"^(?:from|import) (rl_\w+)", text, flags=re.MULTILINE)
    assert {name.replace("_", "-") for name in imported} <= {project["name"], *named}


def test_the_start_page_names_what_each_package_needs():
    rows = dict(re.findall(r"^\| \[(rl-[\w-]+)\].*\| ([^|;]*)[^|]*\|$", (ROOT / "README.md").read_text(), flags=re.M))
    del rows["rl-stack"]
    everywhere = {"rl-protocol", "numpy", "msgspec"}
    needs: dict[str, set[str]] = {}
    for name in rows:
        project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        linux = [line for line in project["dependencies"] if "sys_platform != 'linux'" not in line]
        needs[name] = {re.split(r"[^\w-]", line)[0] for line in linux} - everywhere
    assert {name: {*filter(None, cell.strip().split(", "))} for name, cell in rows.items()} == needs


def test_keys_in_the_prose_are_options():
    """A key that is renamed is renamed in the documents, too."""
    options = set(re.findall(r"^\| `([\w.]+)` \|", (ROOT / "apps/ppo/OPTIONS.md").read_text(), flags=re.MULTILINE))
    known = {".".join(key.split(".")[:depth]) for key in options for depth in range(1, 9)} | THEIR_KEYS
    groups = {key.split(".")[0] for key in options if "." in key}
    named = {
        key
        for path in READMES
        for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL))
        for key in re.findall(r"(?<![\w./])([a-z_]+(?:\.[a-z_]+)+)(?=$|[=\s,;)])", span)
        if key.split(".")[0] in groups
    }
    assert len(named & options) > 100
    assert sorted(named - known) == []


def test_estimators_and_losses_in_the_prose_are_there():
    rows = (ROOT / "apps/ppo/OPTIONS.md").read_text()
    for key in ("adv_estimator", "loss_mode"):
        (listed,) = re.findall(rf"^\| `[\w.]+\.{key}` \|.*?: ([a-z_0-9, ]+);", rows, flags=re.MULTILINE)
        prose = [re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL) for path in READMES]
        named = {name for text in prose for name in re.findall(rf"{key}=([a-z_0-9]+)(?![\w.:])", text)}
        assert len(named) > 4
        assert sorted(named - {*listed.split(", "), "my_estimator", "my_loss"}) == []  # those of a guide


def test_pictures_are_there_and_small():
    """tests/helpers/pictures.py makes those of a run."""
    shown = {
        (path.parent / target).resolve()
        for path in READMES
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", path.read_text(encoding="utf-8"))
    }
    assert {"terminal-run.svg", "report-overview.png"} <= {path.name for path in shown}
    assert [path for path in shown if not path.is_file() or path.stat().st_size > 300_000] == []


def test_commands_are_found():
    assert len(commands()) > 20


@pytest.mark.parametrize(("place", "words"), commands(), ids=[place for place, _ in commands()])
def test_a_command_of_the_app_resolves(place: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Started with --cfg in place of a run, in a folder that holds the files the READMEs name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("rollout: {n: 4}\n")
    (tmp_path / "verl.sh").write_text("algorithm.adv_estimator=gae\n")
    for path in READMES:
        saved = r"Save this as `(\w+\.py)`.*?^```python\n(.*?)^```"
        for name, code in re.findall(saved, path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE):
            (tmp_path / name).write_text(code)
    for example in ROOT.glob("packages/*/examples/*.py"):
        shutil.copy(example, tmp_path)
    (tmp_path / "outputs" / "<run>").mkdir(parents=True)
    (tmp_path / "outputs" / "<run>" / "config.yaml").write_text("rollout: {n: 4}\n")
    adapter = tmp_path / "outputs" / "RUN" / "checkpoint"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}')
    save_file(
        {f"base_model.model.layers.0.q_proj.lora_{side}.weight": np.zeros((8, 8), np.float32) for side in "AB"},
        adapter / "adapter_model.safetensors",
    )
    words = [
        word for word in words if word not in ("--plan", ">") and not word.startswith("run.")
    ]  # no config.json here
    answers = any(word in ("--help", "--cfg", "--explain", "--diff", "--from-verl", "--launch") for word in words)
    assert main(words if answers else [*words, "--cfg"]) == 0


@pytest.mark.parametrize(("place", "words"), commands("uv run rl "), ids=[place for place, _ in commands("uv run rl ")])
def test_a_command_of_rl_succeeds(place: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("<run>", "fast", "slow"):
        _write_run(tmp_path / "outputs" / name)
    if words[0] == "replay":
        for name in ("kept", "<other>"):
            keep_run(tmp_path / "outputs" / name, {step: [1.0, 0.0] for step in range(1, 8)})
        if not {"--row", "--field", "--against"} & set(words):  # it would train; test_replay.py does
            words = [*words, "--field", "advantages"]
    (tmp_path / "verl.sh").write_text("algorithm.adv_estimator=gae\n")
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


def _write_run(run: Path) -> None:
    """Write the folder of a run of no steps."""
    (run / "samples").mkdir(parents=True)
    (run / "config.yaml").write_text("rollout: {n: 4}\n")
    outcome = {"type": "scored", "numbers": {"score": 1.0}, "texts": {}}
    texts = {"data_source": "", "prompt": "1+1=", "response": "2", "ground_truth": "2"}
    (run / "samples" / "5.jsonl").write_text(json.dumps({"key": "v5-0/0/0", **texts, "outcome": outcome}) + "\n")
    record = RecordFile(run / "record", "driver")
    record.append([EndRow(at=0.0, outcome="finished", text="")])
    record.close()


def test_the_vocabulary(readme_code):
    exec(compile(readme_code("packages/rl-protocol", 0), "README.md", "exec"), {})


def test_the_reward_of_the_guide(readme_code):
    space: dict[str, object] = {}
    exec(compile(readme_code("docs/guides", 0, "reward.md"), "reward.md", "exec"), space)
    score = space["score"]
    assert callable(score)
    assert score("sums", "81", "82") == {"score": 1 / 2, "acc": 0.0, "pred": "81"}


@pytest.mark.parametrize("file", sorted((ROOT / "containers").iterdir()), ids=lambda path: path.name)
def test_a_container_file_starts_the_app_from_the_locked_environment(file: Path):
    lines = [line for line in file.read_text().replace("\\\n", " ").splitlines() if not line.startswith("#")]
    assert lines[0].startswith("FROM ")
    assert {line.split()[0] for line in lines} <= {"FROM", "COPY", "ENV", "WORKDIR", "RUN", "CMD"}
    assert "WORKDIR /app" in lines
    assert any(line.startswith("RUN ") and "--locked" in line for line in lines)
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = ({*re.findall(rf"--{kind} (\S+)", "\n".join(lines))} for kind in ("extra", "group"))
    assert extras <= {*root["project"]["optional-dependencies"]}
    assert groups == {"dashboard"} & {*root["dependency-groups"]}, "KubeRay submits jobs to the dashboard"
    assert not any("[" in line for line in lines if "uv pip install" in line), "extras of packages are in the lock"
    assert json.loads(lines[-1].removeprefix("CMD ")) == ["uv", "run", "apps/ppo"]


@pytest.mark.parametrize("file", sorted((ROOT / "containers").iterdir()), ids=lambda path: path.name)
def test_a_container_file_suits_any_user_and_keeps_its_dependencies(file: Path):
    lines = [line for line in file.read_text().replace("\\\n", " ").splitlines() if not line.startswith("#")]
    environment = dict(word.split("=", 1) for line in lines if line.startswith("ENV ") for word in line.split()[1:])
    assert environment["UV_NO_CACHE"] == "1", "users other than root can't write the cache of root"
    if "UV_PYTHON" in environment:
        assert environment["UV_PYTHON_INSTALL_DIR"] == "/opt/python", "users other than root can't read below /root"
    code = lines.index("COPY . .")
    assert lines.index("COPY pyproject.toml uv.lock ./") < code
    (dependencies,) = (line for line in lines[:code] if "uv.lock" not in line and "--frozen" in line)
    assert "workspace" in dependencies, "members are not there yet"
    assert any("install" in line and " wget " in line for line in lines), "the probes of KubeRay 1.5 call it"


def test_no_image_takes_secrets_or_the_environment_of_the_host():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()  # podman reads it, and Docker no other name
    assert {".git", ".venv*", ".ray-token-*", "outputs"} <= set(ignored)
