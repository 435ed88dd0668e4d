"""The checks of `rl doctor`, of `rl plan` and of a run before it starts: one list."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import msgspec

from rl_app_ppo.checks import host
from rl_app_ppo.checks.facts import Facts
from rl_app_ppo.checks.machine import (
    check_cores,
    check_gpus,
    check_hosts,
    check_installed_engines,
    check_network,
    check_sync_on_gpus,
)
from rl_app_ppo.checks.memory import available_bytes, check_plane_size, step_bytes
from rl_app_ppo.checks.model import check_context, check_described, check_model, check_models_fit
from rl_app_ppo.checks.prompts import check_prompts_are_known
from rl_app_ppo.checks.ray_clusters import check_address_is_read, check_cluster, check_no_other, check_ray_folder
from rl_app_ppo.checks.reference import check_reference, check_teacher_prompt
from rl_app_ppo.checks.rewards import check_rewards, check_sources
from rl_app_ppo.config.devices import idle_gpus
from rl_app_ppo.config.full_keys import full_keys_in_errors, full_keys_in_logs
from rl_app_ppo.demo.settings import ModelSettings
from rl_app_ppo.inputs.data import check_answers, longest_teacher_prompt, sessions_of, train_order
from rl_app_ppo.inputs.demo_model import check_demo_model
from rl_app_ppo.inputs.tokenizer import session_tokenizer
from rl_app_ppo.outputs.metric_sinks import check_installed, logger_names
from rl_app_ppo.outputs.run_folder import check_new, check_room
from rl_app_ppo.outputs.run_journal import check_kept_rows
from rl_protocol import ConfigError, OutputError
from rl_protocol.counted import counted
from rl_protocol.support.host.this_process import usable_cores
from rl_trainer import build_graph
from rl_trainer.driver.hooks import named_hooks
from rl_transferqueue import check_plane

Command: TypeAlias = Literal["doctor", "plan", "run"]
Level: TypeAlias = Literal["warning", "error"]


class Finding(msgspec.Struct, frozen=True):
    """What a check found.

    Attributes:
        what: name of the check.
        level: `warning`: a run starts, and may go wrong or be slow; `error`: no run starts.
        text: what was found; for warnings and errors also what to do.
        remedy: keys to set or commands to run; empty: nothing is wrong.
    """

    what: str
    level: Literal["ok", "warning", "error"]
    text: str
    remedy: str = ""


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check.

    Attributes:
        name: of the check.
        look: raises ConfigError or OutputError where something is wrong, else returns what was
            found, or None.
        fine: what was found where `look` returns None.
        used_by: commands that make it.
        remedy: keys to set or commands to run where something is wrong.
        needs: checks of errors that `look` would repeat.
        level: of what is wrong.
    """

    name: str
    look: Callable[[Facts], str | None]
    fine: str = ""
    used_by: frozenset[Command]
    remedy: str
    needs: frozenset[str] = frozenset()
    level: Level = "error"


def findings(facts: Facts, command: Command) -> Iterator[Finding]:
    """What the checks of a command find. One that needs a check with an error is left out."""
    failed = set[str]()
    for check in CHECKS:
        if command not in check.used_by:
            continue
        if failed & check.needs:
            failed.add(check.name)
            continue
        try:
            with full_keys_in_errors(), full_keys_in_logs():
                text = check.look(facts) or check.fine
        except (ConfigError, OutputError) as error:
            if check.level == "error":
                failed.add(check.name)
            yield Finding(check.name, check.level, str(error), check.remedy)
        else:
            yield Finding(check.name, "ok", text)


@full_keys_in_errors()
@full_keys_in_logs()
def preflight(facts: Facts) -> list[str]:
    """Make the checks of a run before it starts; returns the warnings.

    Raises:
        ConfigError: an error in configuration, data or model, the first that is found; names the
            key.
        OutputError: one in the folder of the run.
    """
    warnings = list[str]()
    for check in CHECKS:
        if "run" in check.used_by:
            try:
                check.look(facts)
            except (ConfigError, OutputError) as error:
                if check.level == "error":
                    raise
                warnings.append(f"warning: {error}")
    return warnings


def _rewards_of_rows(facts: Facts) -> None:
    check_sources(facts.config, facts.data)


def _data(facts: Facts) -> str:
    shown = ", ".join(f"{len(rows)} of {split}" for split, rows in facts.data.items())
    train_order(facts.config, facts.data["train"]).rows(0)  # raises if the curriculum can't order these rows
    return f"prompts: {shown}; the longest has {facts.longest} tokens"


def _answers(facts: Facts) -> None:
    if facts.config.demonstrates:
        check_answers(facts.config, session_tokenizer(facts.tokenizer), facts.data["train"])


def _reference(facts: Facts) -> None:
    config, tokenizer = facts.config, session_tokenizer(facts.tokenizer)
    longest = facts.longest
    if config.algorithm.teacher_context:
        longest = max(longest_teacher_prompt(config, tokenizer, rows) for rows in facts.data.values())
        check_teacher_prompt(config, longest, facts.context)
    most = longest + config.rollout.response_length
    check_reference(facts.config, facts.tokenizer.get_vocab(), most, facts.sight)


def _loggers(facts: Facts) -> str | None:
    names = logger_names(facts.config.trainer.logger)
    if facts.supposed_gpus is not None:
        return "packages not looked at: trainer.n_gpus_per_node plans for another machine"
    check_installed(names)
    return None


def _hooks(facts: Facts) -> None:
    named_hooks(facts.config.trainer.hooks)


def _algorithm(facts: Facts) -> None:
    build_graph(facts.config.algorithm, facts.config.actor)


def _plane_settings(facts: Facts) -> None:
    check_kept_rows(facts.config)
    if facts.config.transfer_queue.backend == "memory":
        raise ConfigError(
            "transfer_queue.backend=memory keeps rows in the memory of one process, and the workers of a run are others; set "
            "transfer_queue.backend=simple."
        )


def _room_of_data(facts: Facts) -> None:
    config, train = facts.config, facts.data["train"]
    validation = len(facts.data["val"]) if "val" in facts.data else 0
    sessions = sessions_of(config, train)
    most = config.rollout.n if sessions is None else max(map(sessions, range(len(train))))
    images = facts.image_tokens * facts.sight.token_bytes if facts.sight else 0
    needed = step_bytes(config, facts.graph, facts.longest, validation, facts.routed_layers, most, images)
    check_plane_size(config, needed)


def planned_step_bytes(facts: Facts) -> int:
    """Memory of the data plane for a step whose prompts are as long as allowed, with an image each
    where the model reads images.
    """
    config = facts.config
    longest = config.data.max_prompt_length if config.data.train_files else ModelSettings().context
    graph = build_graph(config.algorithm, config.actor, kept=config.rollout.records_kept_sets)
    tower = facts.role_sizes("actor").vision
    images = tower.image_bytes(facts.planned_image_tokens) if tower else 0
    return step_bytes(config, graph, longest, 0, facts.routed_layers, image_bytes=images)


def _engines(facts: Facts) -> str | None:
    if facts.supposed_gpus is not None:
        return "not looked at: trainer.n_gpus_per_node plans for another machine"
    check_installed_engines(facts.config)
    return None


def _devices(facts: Facts) -> str | None:
    if facts.supposed_gpus is None:
        check_gpus(facts.config, facts.sync.capabilities.devices)
        if facts.elsewhere:
            return "known when the run joins the cluster"
    check_sync_on_gpus(facts.config, facts.planned, facts.sync.capabilities.devices)
    processes, gpus = len(facts.planned), sum(process.gpus for process in facts.planned)
    return f"{processes} {'process' if processes == 1 else 'processes'} on {counted(gpus, 'GPU')}"


def _cores(facts: Facts) -> str | None:
    if facts.elsewhere:
        return "not looked at: the processes run on other machines"
    check_cores(facts.config, facts.planned, usable_cores())
    return None


def _gpu_memory(facts: Facts) -> str | None:
    if facts.described is None or facts.elsewhere or not facts.gpu_bytes:
        return "no model of your own on a GPU of this machine"
    from rl_app_ppo.checks.process_memory import check_gpu_memory  # torch: a run on the CPU checks without

    check_gpu_memory(facts.described, facts.config, facts.planned, facts.gpu_bytes)
    return None


def _host_memory(facts: Facts) -> str | None:
    if facts.elsewhere:
        return "not looked at: the processes run on other machines"
    from rl_app_ppo.checks.process_memory import check_host_memory  # torch

    return check_host_memory(
        facts.role_sizes, facts.config, facts.planned, available_bytes(), image_tokens=facts.planned_image_tokens
    )


def _idle_gpus(facts: Facts) -> None:
    if facts.elsewhere and facts.supposed_gpus is None:
        return
    if warning := idle_gpus(facts.config, facts.planned, facts.gpus):
        raise ConfigError(warning)


def _file_size(facts: Facts) -> str:
    config = facts.config
    return host.file_size_text(max(config.transfer_queue.unit_bytes, config.trainer.min_free_disk_mb << 20))


def _run_folder(facts: Facts) -> str:
    if facts.config.trainer.resume_mode != "auto":
        check_new(facts.folder)
    after = facts.start.checkpoint
    return f"{facts.folder}, after step {after.manifest.step}" if after else f"{facts.folder}, from the beginning"


def _checkpoints(facts: Facts) -> None:
    if facts.start.notes:
        raise ConfigError("; ".join(facts.start.notes))


DOCTOR: frozenset[Command] = frozenset({"doctor"})
BEFORE: frozenset[Command] = frozenset({"doctor", "run"})
PLANNED: frozenset[Command] = frozenset({"doctor", "plan"})
ALL: frozenset[Command] = frozenset({"doctor", "plan", "run"})
MAPPED, MODEL, DATA = frozenset({"address space"}), frozenset({"model"}), frozenset({"model", "data"})

CHECKS = (
    Check(name="Python", look=lambda _: host.python_text(), used_by=DOCTOR, remedy="uv python install"),
    Check(name="address space", look=lambda _: host.address_space_text(), used_by=ALL, remedy="ulimit -v unlimited"),
    Check(name="torch", look=lambda _: host.torch_text(), used_by=DOCTOR, remedy="uv sync", needs=MAPPED),
    Check(
        name="GPUs",
        look=lambda _: host.gpus_text(),
        used_by=DOCTOR,
        remedy="nvidia-smi",
        needs=MAPPED,
        level="warning",
    ),
    Check(name="memory", look=lambda _: host.memory_text(), used_by=DOCTOR, remedy="model.path", level="warning"),
    Check(
        name="shared memory",
        look=lambda _: host.shared_memory_text(),
        used_by=DOCTOR,
        remedy="docker run --shm-size=8g",
        level="warning",
    ),
    *(
        Check(name=setting, look=lambda _, key=setting: host.package_text(key), used_by=DOCTOR, remedy="uv sync")
        for setting in host.OPTIONAL
    ),
    Check(
        name="other Ray",
        look=lambda facts: check_no_other(facts.config.ray),
        fine="no other Ray runs on this machine",
        used_by=DOCTOR,
        remedy="ray stop, ray.address",
        level="warning",
    ),
    Check(
        name="RAY_ADDRESS",
        look=lambda facts: check_address_is_read(facts.config.ray),
        used_by=BEFORE,
        remedy="ray.address",
        level="warning",
    ),
    Check(
        name="RAY_TMPDIR",
        look=lambda facts: check_ray_folder(facts.config.ray),
        used_by=BEFORE,
        remedy="RAY_TMPDIR",
    ),
    Check(
        name="algorithm",
        look=_algorithm,
        fine="its stages fit together",
        used_by=ALL,
        remedy="algorithm",
    ),
    Check(
        name="reward",
        look=lambda facts: check_rewards(facts.config.reward),
        fine="its functions exist and are allowed",
        used_by=ALL,
        remedy="reward.function, --trust FILE",
    ),
    Check(
        name="weight sync",
        look=lambda facts: facts.sync.name,
        used_by=ALL,
        remedy="checkpoint_engine.backend",
    ),
    Check(
        name="loggers",
        look=_loggers,
        fine="their packages are installed",
        used_by=ALL,
        remedy="trainer.logger",
    ),
    Check(
        name="hooks",
        look=_hooks,
        fine="they exist and are allowed",
        used_by=ALL,
        remedy="trainer.hooks",
    ),
    Check(
        name="model",
        look=check_model,
        fine="it is whole, and the settings fit it",
        used_by=BEFORE,
        remedy="model.path",
    ),
    Check(
        name="config.json",
        look=check_described,
        fine="the settings fit it",
        used_by=frozenset({"plan"}),
        remedy="model.path, model_engine",
    ),
    Check(
        name="demo model",
        look=lambda facts: check_demo_model(facts.config),
        used_by=BEFORE,
        remedy="model.cache_dir",
    ),
    Check(
        name="engines",
        look=_engines,
        fine="their packages are installed",
        used_by=ALL,
        remedy="uv run --extra, model_engine, rollout.name",
    ),
    Check(name="loopback", look=lambda _: host.loopback_text(), used_by=BEFORE, remedy="ip link set lo up"),
    Check(
        name="network",
        look=lambda facts: check_network(facts.config),
        fine="the interface exists",
        used_by=BEFORE,
        remedy="trainer.network_interface",
    ),
    Check(
        name="Ray",
        look=lambda facts: check_cluster(facts.config.ray),
        used_by=BEFORE,
        remedy="ray start, ray.address",
    ),
    Check(
        name="hosts",
        look=lambda facts: check_hosts(facts.config, facts.sync),
        fine="the processes reach each other",
        used_by=BEFORE,
        remedy="ray.address, transfer_queue.listen, checkpoint_engine.backend",
        needs=frozenset({"weight sync"}),
    ),
    Check(
        name="devices",
        look=_devices,
        used_by=ALL,
        remedy="trainer.n_gpus_per_node",
        needs=frozenset({"weight sync", "engines"}),
    ),
    Check(
        name="idle GPUs",
        look=_idle_gpus,
        fine="none",
        used_by=PLANNED,
        remedy="trainer.n_gpus_per_node",
        needs=frozenset({"devices"}),
        level="warning",
    ),
    Check(
        name="cores",
        look=_cores,
        fine="enough for the processes",
        used_by=ALL,
        remedy="rollout.num_workers, reward.num_workers",
        needs=frozenset({"devices"}),
        level="warning",
    ),
    Check(
        name="data plane",
        look=_plane_settings,
        fine="its settings fit the run",
        used_by=ALL,
        remedy="transfer_queue.backend, transfer_queue.durability",
    ),
    Check(
        name="storage",
        look=lambda facts: check_plane(facts.config.transfer_queue),
        fine="the data plane can hold its rows, and its address is free",
        used_by=BEFORE,
        remedy="transfer_queue.backend, transfer_queue.listen, transfer_queue.journal_dir",
        needs=frozenset({"data plane"}),
    ),
    Check(name="data", look=_data, used_by=BEFORE, remedy="data.train_files, data.val_files", needs=MODEL),
    Check(
        name="unknown characters",
        look=check_prompts_are_known,
        fine="the tokenizer knows those of the prompts",
        used_by=BEFORE,
        remedy="model.path",
        needs=DATA,
        level="warning",
    ),
    Check(
        name="reward of rows",
        look=_rewards_of_rows,
        fine="the first row has one",
        used_by=BEFORE,
        remedy="reward.function",
        needs=DATA,
    ),
    Check(
        name="answers",
        look=_answers,
        fine="each row has one, where they are trained on",
        used_by=BEFORE,
        remedy="data.answer_key",
        needs=DATA,
    ),
    Check(
        name="reference",
        look=_reference,
        fine="it fits the policy",
        used_by=BEFORE,
        remedy="reference.path",
        needs=DATA,
    ),
    Check(
        name="room of a step",
        look=_room_of_data,
        fine="the data plane can hold a step",
        used_by=BEFORE,
        remedy="transfer_queue.capacity_mb",
        needs=DATA,
    ),
    Check(
        name="room of a planned step",
        look=lambda facts: check_plane_size(facts.config, planned_step_bytes(facts)),
        fine="the data plane can hold a step",
        used_by=frozenset({"plan"}),
        remedy="transfer_queue.capacity_mb",
        needs=MAPPED,
    ),
    Check(
        name="memory of the model",
        look=check_models_fit,
        fine="the models fit",
        used_by=BEFORE,
        remedy="model.path, lora.rank, rollout.num_workers",
        needs=MODEL | {"devices"},
    ),
    Check(
        name="GPU memory",
        look=_gpu_memory,
        fine="the models fit",
        used_by=ALL,
        remedy="model.path, lora.rank, fsdp.world_size",
        needs=MODEL | {"devices"},
    ),
    Check(
        name="memory of passes",
        look=_host_memory,
        fine="no process computes on the CPU",
        used_by=PLANNED,
        remedy="actor.ppo_max_token_len, rollout.max_batch_size",
        needs=MAPPED | {"memory of the model", "devices"},
        level="warning",
    ),
    Check(
        name="context",
        look=check_context,
        fine="prompts and responses fit the model's context",
        used_by=BEFORE,
        remedy="rollout.response_length, data.max_prompt_length",
        needs=DATA,
    ),
    Check(
        name="disk",
        look=lambda facts: check_room(facts.output, facts.config.trainer.min_free_disk_mb),
        used_by=BEFORE,
        remedy="trainer.output_dir, trainer.min_free_disk_mb",
    ),
    Check(
        name="file size",
        look=_file_size,
        used_by=BEFORE,
        remedy="ulimit -f, transfer_queue.capacity_mb",
    ),
    Check(
        name="run folder",
        look=_run_folder,
        used_by=BEFORE,
        remedy="trainer.run_name, trainer.resume_mode",
        needs=DATA,
    ),
    Check(
        name="checkpoints",
        look=_checkpoints,
        fine="nothing to note",
        used_by=DOCTOR,
        remedy="trainer.resume_mode",
        needs=frozenset({"run folder"}),
        level="warning",
    ),
)
"""All checks, in the order in which a run makes them."""
