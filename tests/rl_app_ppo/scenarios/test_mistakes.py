"""Common first mistakes with your own data and model.

Each one gives a single paragraph with the remedy, exit code 2, and no output folder.
"""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rl_app_ppo.cli.main import main

ALPHABET = ("<pad>", "<eos>", "<unk>", *" abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-*/=?.,")
QUESTIONS = [{"question": f"What is {i} plus {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(20)]
ROWS = [
    {"prompt": row["question"], "data_source": "sums", "reward_model": {"ground_truth": row["answer"].split()[-1]}}
    for row in QUESTIONS
]
BROKEN = [*map(json.dumps, ROWS[:5]), '{"prompt": ', *map(json.dumps, ROWS[5:])]


def lines(rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's folder: a model, correct rows, and files with mistakes."""
    folder = tmp_path_factory.mktemp("user")
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "max_position_embeddings": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": len(ALPHABET)}
    with torch.random.fork_rng(devices=[]):
        Qwen2ForCausalLM(Qwen2Config(**shape, **heads, pad_token_id=0, eos_token_id=1)).save_pretrained(
            folder / "untold"
        )
    (folder / "model").mkdir()
    for file in (folder / "untold").iterdir():
        (folder / "model" / file.name).write_bytes(file.read_bytes())
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        folder / "model"
    )
    for name, changes in (("teacher", {"hidden_size": 32}), ("short", {"max_position_embeddings": 32})):
        copied = {file.name: file.read_bytes() for file in (folder / "model").glob("token*")}
        Qwen2ForCausalLM(Qwen2Config(**{**shape, **changes}, **heads)).save_pretrained(folder / name)
        for file, content in copied.items():
            (folder / name / file).write_bytes(content)
    (folder / "cut").mkdir()
    for file in (folder / "model").iterdir():
        (folder / "cut" / file.name).write_bytes(file.read_bytes())
    with (folder / "cut" / "model.safetensors").open("r+b") as weights:
        weights.truncate(5000)
    (folder / "shallow").mkdir()
    for file in (folder / "model").iterdir():
        (folder / "shallow" / file.name).write_bytes(file.read_bytes())
    described = json.loads((folder / "model" / "config.json").read_text()) | {"num_hidden_layers": 2}
    (folder / "shallow" / "config.json").write_text(json.dumps(described))
    (folder / "foreign").mkdir()
    for file in (folder / "teacher").iterdir():
        (folder / "foreign" / file.name).write_bytes(file.read_bytes())
    described = json.loads((folder / "foreign" / "tokenizer.json").read_text())
    vocabulary = described["model"]["vocab"]
    vocabulary["#"] = vocabulary.pop("+")
    (folder / "foreign" / "tokenizer.json").write_text(json.dumps(described))
    texts = {
        "ok.jsonl": lines(ROWS),
        "qa.jsonl": lines(QUESTIONS),
        "broken.jsonl": lines(BROKEN),
        "long.jsonl": lines([{**row, "prompt": row["prompt"] * 9} for row in ROWS]),
        "no_truth.jsonl": lines([{**row, "reward_model": {}} for row in ROWS]),
        "empty.jsonl": "",
        "a.csv": "question,answer\n1,2\n",
        "a.txt": "hello",
        "a.parquet": "hello",
        "syntax.py": "def score(:\n    pass\n",
        "imports.py": "import nowhere\n\n\ndef score(*args):\n    return 1.0\n",
        "other.py": "def scoer(*args):\n    return 1.0\n",
        "keyword.py": "def score(source, answer, truth, extra=None, *, weight):\n    return weight\n",
        "bad.yaml": "a: [1,\n",
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "utf16.jsonl").write_text(lines(ROWS), encoding="utf-16")
    (folder / "latin.jsonl").write_text(lines([*map(json.dumps, ROWS), '{"prompt": "Größe"}']), encoding="latin-1")
    pq.write_table(pa.Table.from_pylist(QUESTIONS), folder / "qa.parquet")
    (folder / "folder").mkdir()
    return folder


SDFT = ["algorithm.teacher_context='1'", "algorithm.teacher_is_policy=true", "algorithm.teacher_ema=0.9"]
MISTAKES = [
    (["data.train_files=gone.jsonl"], ["gone.jsonl (relative to ", "can't be read: No such file", "data.train_files"]),
    (["data.train_files=folder"], ["folder: not a data set written by save_to_disk"]),
    (["data.train_files=empty.jsonl"], ["No usable row in empty.jsonl", "A row is {"]),
    (["data.train_files=a.txt"], ["a.txt is not a data file", "*.jsonl, *.parquet"]),
    (["data.train_files=a.csv"], ["a.csv is not a data file", "Dataset.from_csv('a.csv').to_parquet('a.parquet')"]),
    (["data.train_files=a.parquet"], ["a.parquet: not a whole parquet file"]),
    (["data.train_files=broken.jsonl"], ["1 bad row: broken.jsonl, row 6: not JSON", "data.on_bad_row=skip"]),
    (["data.train_files=utf16.jsonl"], ["rows of utf16.jsonl: not JSON in UTF-8"]),
    (["data.train_files=latin.jsonl"], ["1 bad row: latin.jsonl, row 21: not JSON in UTF-8", "data.on_bad_row=skip"]),
    (["data.train_files=qa.jsonl"], ["all 20 rows of qa.jsonl", "found: question, answer", "prompt_key=question", "data.ground_truth_key=answer"]),
    (["data.train_files=qa.parquet"], ["all 20 rows of qa.parquet", "data.prompt_key=question"]),
    (["data.train_files=no_truth.jsonl"], ["all 20 rows of no_truth.jsonl", "`ground_truth` - at `$.reward_model`"]),
    (["data.train_files=long.jsonl"], ["longest prompt has", "context is 128", "data.max_prompt_length to at most 112"]),
    (["data.max_prompt_length=3"], ["No usable row", "Prompts with more than 3 tokens (data.max_prompt_length): 20."]),
    (["data.max_prompt_length=3", "data.filter_overlong_prompts=false"], ["more than data.max_prompt_length=3 (data.filter_overlong_prompts=true"]),
    (["data.val_files=gone.jsonl"], ["gone.jsonl (relative to ", "can't be read", "data.val_files"]),
    (["model.path=gone"], ["model.path='gone'", "hf download gone"]),
    (["model.path=folder"], ["model.path='folder'", "config.json", "save_pretrained"]),
    (["model.path=untold"], ["untold", "tokenizer.json"]),
    (["model.path=cut"], ["model.path='cut': model.safetensors has 5000 bytes, and its header says ", "download the folder again"]),
    (["model.path=shallow"], ["model.path='shallow': its weights lack 1 of the 2 layers that config.json names, such as layer 1"]),
    (["rollout.response_length=200"], ["rollout.response_length=200", "context of 128", "at most 10"]),
    (["reward.function=mth"], ["reward.function='mth'", "Did you mean 'math'?"]),
    (["--trust", "syntax.py", "reward.function=syntax.py:score"], ["reward.function='syntax.py:score'", "line 1: invalid syntax", "Fix the file"]),
    (["--trust", "imports.py", "reward.function=imports.py:score"], ["imports.py, line 1 imports 'nowhere', which is not installed", "PYTHONPATH"]),
    (["--trust", "other.py", "reward.function=other.py:score"], ["defines no 'score'; it defines scoer", "Did you mean 'scoer'?"]),
    (["--trust", "keyword.py", "reward.function=keyword.py:score"], ["='keyword.py:score'", "keyword.py:1 is called with 4", "'weight'"]),
    (["reward.function=other.py:scoer"], ["reward.function='other.py'", "not allowed", "add --trust other.py to the command"]),
    (["--trust", "gone.py"], ["--trust gone.py: the file can't be read: No such file"]),
    (["rollout.n=-1"], ["rollout.n must be at least 1; got -1"]),
    (["actor.optim.lr=-1"], ["actor.optim.lr must be at least 0 and finite; got -1"]),
    (["actor.optim.lr=nan"], ["actor.optim.lr must be at least 0 and finite; got nan"]),
    (["actor.optim.lr=inf"], ["actor.optim.lr must be at least 0 and finite; got inf"]),
    (["algorithm=ppo", "critic.optim.lr=-1"], ["critic.optim.lr must be at least 0 and finite; got -1"]),
    (["rollout.n=1"], ["rollout.n must be at least 2 with algorithm.adv_estimator=grpo"]),
    (["data.train_batch_size=10"], ["data.train_batch_size must be divisible by actor.ppo_mini_batch_size (8); got 10"]),
    (["model_engine=fsdp", "fsdp.world_size=64"], ["actor.ppo_mini_batch_size", "fsdp.world_size"]),
    (["algorithm=sft", "rollout.n=1", "rollout.response_length=1"], ["rollout.response_length=1", "sft_coef", "an answer of 2 tokens"]),
    (["algorithm=sft", "rollout.n=1", "data.answer_key=solution"], ["data.answer_key='solution'", "got None", "that has ground_truth"]),
    (["algorithm=sft"], ["rollout.n must be 1 with algorithm.rl_coef=0", "got 4"]),
    (["algorithm.sft_coef=1", "rollout.temperature=0.7"], ["rollout.temperature must be 1 with algorithm.sft_coef", "got 0.7"]),
    (["algorithm.echo_coef=1"], ["algorithm.echo_coef must be 0 with rollout.session=single_turn", "got 1"]),
    (["algorithm.sft_coef=1", "algorithm.adv_estimator=gae"], ["algorithm.adv_estimator=gae", "algorithm.sft_coef=1"]),
    (["algorithm=opd"], ["reference.path must be the teacher's checkpoint folder", "got ''"]),
    (["algorithm=opd", "reference.path=gone"], ["reference.path='gone'", "hf download gone"]),
    (["algorithm=opd", "reference.path=untold"], ["reference.path='", "tokenizer.json"]),
    (["algorithm=opd", "reference.path=foreign"], ["reference.path='foreign' has another tokenizer", "it differs in 2 tokens, such as '#'"]),
    (["algorithm=opd", "reference.path=cut"], ["reference.path='cut': model.safetensors has 5000 bytes", "download the folder again"]),
    (["algorithm=opd", "reference.path=short"], ["reference.path='short' has a context of 32 tokens", "rollout.response_length"]),
    (["algorithm=opd", "reference.path=teacher", "model_engine=megatron"], ["actor.kl_loss_topk=64", "algorithm=opd_pg", "model_engine=fsdp"]),
    (["algorithm=opd", f"algorithm.teacher_context={'1+2=' * 30}"], ["teacher_context makes prompts of up to", "context of 128"]),
    (
        ["algorithm=opd", f"algorithm.teacher_context={'1+2=' * 6}", "actor.ppo_max_token_len=40"],
        ["actor.ppo_max_token_len must hold the longest prompt of", "that algorithm.teacher_context makes", "got 40"],
    ),
    (["algorithm=opd", "algorithm.teacher_context='{answer}'", "data.answer_key=solution"], ["data.answer_key='solution'", "got None"]),
    (["algorithm=opd", "algorithm.teacher_context='1'", "algorithm.teacher_is_policy=true", "reference.path=teacher"], ["must be empty"]),
    (["algorithm=opd", "algorithm.teacher_context='1'", "algorithm.teacher_ema=0.9"], ["algorithm.teacher_ema", "teacher_is_policy"]),
    (["algorithm=opd_pg", *SDFT, "model_engine=megatron"], ["algorithm.teacher_ema must be 0", "keeps no moving average", "got 0.9"]),
    (["reward.function=exact_match@other"], ["reward.function has no reward function for data_source=", "only for other"]),
    (["actor.use_kl_loss=false", "algorithm.teacher_context='1'"], ["algorithm.teacher_context=1 has no effect"]),
    (["algorithm=ppo", "reference.path=teacher"], ["reference.path", "algorithm.adv_estimator=opd"]),
    (["lora.adapter_path=model"], ["lora.adapter_path='model' must be a PEFT folder", "it has no adapter_config.json"]),
    (["lora.adapter_path=gone"], ["lora.adapter_path='gone' must be a PEFT folder", "adapter_config.json", "rl-megatron-peft convert"]),
    (["algorithm=ppo", "critic.adapter_path=model"], ["critic.adapter_path='model' must be a PEFT folder", "no adapter_config.json"]),
    (["trainer.output_dir=/proc/nowhere"], ["/proc/nowhere", "trainer.output_dir"]),
    (["--config", "bad.yaml"], ["--config bad.yaml", " at line 2, column 1"]),
    (["--config", "gone.yaml"], ["--config gone.yaml", "No such file"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "words"), MISTAKES, ids=[" ".join(overrides) for overrides, _ in MISTAKES])
def test_a_mistake_is_one_paragraph_and_leaves_nothing(folder, tmp_path, monkeypatch, capsys, overrides, words):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    code = main(
        [
            *("model.path=model", "data.train_files=ok.jsonl", "reward.function=math", "rollout.response_length=16"),
            *("data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=4", "rollout.num_workers=1"),
            *("trainer.output_dir=outputs", f"model.cache_dir={tmp_path / 'cache'}"),
            *(["critic.ppo_mini_batch_size=8"] if "algorithm=ppo" in overrides else []),
            *overrides,
        ]
    )
    out, error = capsys.readouterr()
    assert code == 2
    assert all("checking configuration" in line for line in out.splitlines())  # on a slow machine
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    for word in words:
        assert word in error, error
    assert sorted(folder.rglob("*")) == before
