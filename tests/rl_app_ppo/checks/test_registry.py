"""One list of checks for `rl doctor`, `rl plan` and the start of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rl_app_ppo.checks import facts as facts_module
from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.registry import CHECKS, Finding, findings, preflight
from rl_app_ppo.cli import rl
from rl_app_ppo.config.loading import load_config
from rl_ckpt_engine import PluginPolicy
from rl_protocol import ConfigError, OutputError


def facts_of(*words: str) -> Facts:
    return Facts(load_config(words), PluginPolicy())


def by_name(*words: str) -> Mapping[str, Finding]:
    return {found.what: found for found in findings(facts_of(*words), "doctor")}


def test_each_check_has_a_command_a_remedy_and_needs_only_checks_before_it() -> None:
    before = set[str]()
    for check in CHECKS:
        assert check.name not in before
        assert check.needs <= before
        assert check.remedy
        assert check.used_by
        before.add(check.name)


def test_the_doctor_makes_every_check_of_a_run() -> None:
    assert all("doctor" in check.used_by for check in CHECKS if "run" in check.used_by)


def test_the_demo_can_start_here(tmp_path: Path) -> None:
    found = by_name(f"trainer.output_dir={tmp_path / 'a' / 'b'}")
    assert {one.what for one in found.values() if one.level == "error"} == set()
    assert list(found)[:4] == ["Python", "address space", "torch", "GPUs"]
    assert found["data"].text == "prompts: 4000 of train, 512 of val; the longest has 6 tokens"
    assert str(tmp_path) in found["disk"].text
    assert {"rollout.name=vllm", "model_engine=megatron", "trainer.logger=wandb"} <= found.keys()


def test_the_doctor_finds_all_mistakes_and_a_run_ends_at_the_first() -> None:
    words = ("rollout.response_length=64", "trainer.min_free_disk_mb=999999999", "trainer.network_interface=eth77")
    found = by_name(*words)
    wrong = {name: one for name, one in found.items() if one.level == "error"}
    assert list(wrong) == ["network", "context", "disk"]
    assert wrong["context"].remedy == "rollout.response_length, data.max_prompt_length"
    assert "trainer.min_free_disk_mb=999999999" in wrong["disk"].text
    with pytest.raises(ConfigError, match=r"trainer\.network_interface"):
        preflight(facts_of(*words))
    with pytest.raises(OutputError, match=r"trainer\.min_free_disk_mb=999999999"):
        preflight(facts_of(words[1]))


def test_a_mistake_is_reported_once(tmp_path: Path) -> None:
    """Checks that need the model are left out, and so is what needs them."""
    found = by_name(f"model.path={tmp_path / 'gone'}")
    assert [one.what for one in found.values() if one.level == "error"] == ["model"]
    assert not {"data", "context", "run folder", "checkpoints"} & found.keys()
    assert found["disk"].level == "ok"


def test_the_room_of_a_step_is_that_of_the_most_responses_to_a_prompt_of_the_data(tmp_path: Path) -> None:
    """512 responses, or the answer of the data alone, by the source of the rows."""
    row = {"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}
    found = dict[str, Finding]()
    for name, sources in {"told": ["told"] * 8, "one asked": ["told"] * 7 + ["asked"]}.items():
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row | {"data_source": source}) + "\n" for source in sources))
        found[name] = by_name(
            *(f"data.train_files={file}", "data.val_split=0", f"model.cache_dir={tmp_path}", "actor.use_kl_loss=false"),
            *("rollout.n=512", "transfer_queue.capacity_mb=2", "algorithm.by_source=[rl_coef=0@told,sft_coef=1@told]"),
        )["room of a step"]
    assert found["told"].level == "ok"
    assert found["one asked"].text.startswith("transfer_queue.capacity_mb=2 is too small"), found


def test_a_run_starts_in_spite_of_a_warning_and_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight(facts_of()) == []
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    (warning,) = preflight(facts_of())
    assert warning.startswith("warning: RAY_ADDRESS=10.0.0.1:6379 is set, and ray.address=local does not use it")


def test_the_plan_has_its_checks_as_records_and_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_module, "gpus_found", lambda: 0)
    wrong = ["reward.function=nosuch", "transfer_queue.capacity_mb=2", "rollout.n=512"]
    done = CliRunner().invoke(rl.app, ["plan", *wrong])
    assert done.exit_code == 2, done.output
    assert "error: reward.function='nosuch'" in done.output
    assert "error: transfer_queue.capacity_mb=2 is too small" in done.output
    done = CliRunner().invoke(rl.app, ["plan", "--json", *wrong])
    assert done.exit_code == 2
    records = {record["what"]: record for record in json.loads(done.output)["checks"]}
    assert {name for name, record in records.items() if record["level"] == "error"} == {
        "reward",
        "room of a planned step",
    }
    assert records["reward"]["remedy"] == "reward.function, --trust FILE"
    assert CliRunner().invoke(rl.app, ["plan"]).exit_code == 0


def test_the_records_of_the_doctor_are_its_lines() -> None:
    done = CliRunner().invoke(rl.app, ["doctor", "--json", "trainer.network_interface=eth77"])
    assert done.exit_code == 2
    (wrong,) = [record for record in json.loads(done.output) if record["level"] == "error"]
    assert (wrong["what"], wrong["remedy"]) == ("network", "trainer.network_interface")
    lines = CliRunner().invoke(rl.app, ["doctor", "trainer.network_interface=eth77"]).output.splitlines()
    assert any(line.startswith("error") and wrong["text"] in line for line in lines)
    assert lines[-1] == "1 error: no run with these settings can start."
