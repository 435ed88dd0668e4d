"""`train()` from a script and from a notebook, with objects for model, data and reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = '''
"""A script without a main guard, whose second half is a notebook: cells run inside a running event loop."""
import asyncio
import json
import linecache
import re
import sys

from rl_app_ppo import train

MODEL, FOLDER = sys.argv[1:]
DIGITS = re.compile(r"\\d")
SMALL = {
    "data.train_batch_size": 8, "actor.ppo_mini_batch_size": 8, "actor.optim.lr": 1e-3, "actor.entropy_coeff": 0.01,
    "rollout": {"n": 2, "num_workers": 1, "response_length": 4}, "trainer.total_training_steps": 2,
    "trainer.output_dir": FOLDER, "model.cache_dir": FOLDER + "/cache", "ray.start_timeout_s": 400, "trainer.val_before_train": False,
}
ROWS = [
    {"prompt": [{"role": "user", "content": f"{a}+{b}="}], "data_source": "sums", "reward_model": {"ground_truth": f"{a + b:03}"[::-1]}}
    for a in range(10, 20) for b in range(10, 20)
]


def digits(text):
    return DIGITS.findall(text)


def near(data_source, solution_str, ground_truth, extra_info=None):
    pairs = list(zip(digits(solution_str), ground_truth))
    return {"score": sum(a == b for a, b in pairs) / 3, "acc": float(solution_str == ground_truth)}


def shown(result):
    return {
        "history": [{key: line[key] for key in ("step", "critic/score/mean", "actor/grad_norm")} for line in result.history],
        "same": result.metrics == result.history[-1],
        "folder": str(result.run_folder), "checkpoint": str(result.checkpoint), "model": str(result.model),
    }


script = train(MODEL, ROWS, near, options=SMALL, trainer={"run_name": "script"})

CELL = """
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

def near(data_source, solution_str, ground_truth, extra_info=None):
    pairs = list(zip(digits(solution_str), ground_truth))
    return {"score": sum(a == b for a, b in pairs) / 3, "acc": float(solution_str == ground_truth)}

model, tokenizer = AutoModelForCausalLM.from_pretrained(MODEL), AutoTokenizer.from_pretrained(MODEL)
notebook = train(
    model, Dataset.from_list(ROWS), near, tokenizer=tokenizer, options=SMALL, quiet=True, trainer={"run_name": "notebook"}
)
"""


async def run_cell():
    name = "<ipython-input-1>"
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    exec(compile(CELL, name, "exec", dont_inherit=True), globals())

print("quiet from here")
print("quiet from here", file=sys.stderr)
asyncio.run(run_cell())
with open(FOLDER + "/shown.json", "w") as file:
    json.dump({"script": shown(script), "notebook": shown(notebook)}, file)
'''


@pytest.mark.timeout(1200)
def test_a_script_and_a_notebook_in_one_process_train_alike(base_model, tmp_path: Path, run_script):
    from safetensors.numpy import load_file

    done = run_script(SCRIPT, str(base_model), str(tmp_path))
    assert done.returncode == 0, done.stderr
    loud, quiet = done.stdout.split("quiet from here\n")
    assert "step 2/2" in loud
    assert quiet == ""
    printed = done.stderr.split("quiet from here\n")[1]
    assert "Writing model shards" not in printed
    assert "Creating parquet" not in printed
    shown = json.loads((tmp_path / "shown.json").read_text())
    script, notebook = shown["script"], shown["notebook"]
    assert [line["step"] for line in script["history"]] == [1, 2]
    assert script["history"] == notebook["history"]
    assert script["same"]
    for name, one in shown.items():
        assert Path(one["folder"]) == tmp_path / name
        assert Path(one["checkpoint"]) == tmp_path / name / "checkpoints" / "step-000002"
    ours, theirs, base = (
        load_file(Path(one) / "model.safetensors") for one in (script["model"], notebook["model"], base_model)
    )
    assert all((weights == theirs[name]).all() for name, weights in ours.items())
    assert any((weights != base[name]).any() for name, weights in ours.items())


@pytest.mark.timeout(1200)
def test_the_example_of_the_guide_trains(base_model, tmp_path: Path, run_script, readme_code):
    code = readme_code("docs/guides", 0, "python.md")
    patient = code.replace(
        "trainer={", 'options={"ray.start_timeout_s": 400, "model.cache_dir": "cache"},\n    trainer={'
    )
    assert patient != code
    (tmp_path / "my-model").symlink_to(base_model)
    done = run_script(patient)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "outputs").iterdir()
    assert (folder / "checkpoint" / "model.safetensors").exists()
    assert str(folder / "checkpoint") in done.stdout.splitlines()[-1]
