"""Which files a run reads, by the settings that name them."""

from __future__ import annotations

import hashlib
import json

from trust import trust

from rl_app_ppo.config.loading import load_config
from rl_app_ppo.inputs.data import open_data
from rl_app_ppo.inputs.input_files import InputFiles, input_files


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_data_files_have_the_digests_of_their_preparation(tmp_path):
    def write(name, *numbers):
        rows = [{"data_source": "d", "prompt": f"{i}+1=", "reward_model": {"ground_truth": str(i)}} for i in numbers]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / name

    def found(*overrides):
        config = load_config([f"model.cache_dir={tmp_path / 'cache'}", "data.train_batch_size=1", *overrides])
        return input_files(config, open_data(config, None))

    a, b, v = write("a.jsonl", 1, 2), write("b.jsonl", 3), write("v.jsonl", 4)
    train = {str(a): sha256(a), str(b): sha256(b)}
    small = "actor.ppo_mini_batch_size=1"
    shares = found(f"data.train_files=[0.5*{a},0.5*{b}]", f"data.val_files={v}", small)
    assert shares.digests == {"data.train_files": train, "data.val_files": {str(v): sha256(v)}}
    held_out = found(f"data.train_files=[{a},{b}]", small)
    assert held_out == InputFiles(data={"data.train_files": train})


def test_code_has_digests_where_a_setting_names_it_and_the_user_allows_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RL_TRUSTED_FILES", "{}")
    paths = {
        name: tmp_path / name for name in ("r.py", "judge.toml", "h.py", "servers.json", "unused.py", "refused.py")
    }
    for path in paths.values():
        path.write_text(f"# {path.name}\n")
    trust(*(path for name, path in paths.items() if name != "refused.py"))
    config = load_config(
        [
            "preset=demo-calculator",
            "reward.function=0.5*r.py:score,0.25*judge.toml,0.25*refused.py:score",
            "trainer.hooks=[h.py:hook]",
            "rollout.agent.mcp.servers=servers.json",
        ]
    )
    expected = {
        "reward.function": ("r.py", "judge.toml"),
        "trainer.hooks": ("h.py",),
        "rollout.agent.mcp.servers": ("servers.json",),
    }
    assert input_files(config, {}).code == {
        key: {str(paths[name]): sha256(paths[name]) for name in names} for key, names in expected.items()
    }
