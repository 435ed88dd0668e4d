"""The compatible API behaves like TransferQueue 0.1.11, and raises where that loses data."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import os
import pickle
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compat_scenarios
import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

import rl_transferqueue.compat as tq
from rl_protocol import BatchError, ConfigError, DuplicateKeyError, PlaneLostError, SchemaError, WireError
from rl_transferqueue.compat import lifecycle

HERE = Path(__file__).parent
RECORDED = HERE / "compat_0_1_11.json"
"""The output of compat_peer.py: results and signatures of the original package."""
needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("transfer_queue") is None,
    reason="TransferQueue 0.1.11 is not installed: uv sync --group bench",
)


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    tq.close()
    assert lifecycle.PLANE_VARIABLE not in os.environ


@pytest.fixture
def client() -> tq.TransferQueueClient:
    """Return the client of this process on the plane that most tests share, without rows."""
    tq.init({"controller": {"fetch_timeout_s": 0.3}, "rl_transferqueue": {"capacity_mb": 64, "segment_mb": 1}})
    client = tq.get_client()
    for partition in client.get_partition_list():
        client.clear_partition(partition)
    return client


@pytest.fixture
def no_plane() -> Iterator[None]:
    """Close the shared plane for a test that starts its own."""
    tq.close()
    yield
    tq.close()


def rows(count: int, name: str = "x") -> TensorDict:
    return TensorDict({name: torch.arange(count)}, batch_size=[count])


# --------------------------------------------------------------------------------
# The same user code
@pytest.mark.parametrize("scenario", compat_scenarios.SCENARIOS, ids=lambda s: s.__name__)
def test_user_code_sees_what_it_sees_with_the_package(
    scenario: Any, client: tq.TransferQueueClient, tmp_path: Path
) -> None:
    got = compat_scenarios.play(scenario, tq, tmp_path)
    expected = json.loads(RECORDED.read_text())["scenarios"][scenario.__name__]
    assert json.loads(json.dumps(got)) == expected


def test_everything_a_user_calls_takes_the_same_arguments(client: tq.TransferQueueClient) -> None:
    ours, theirs = compat_scenarios.signatures(tq), json.loads(RECORDED.read_text())["signatures"]
    assert ours.keys() == theirs.keys()
    for name, arguments in theirs.items():
        mine = ours[name]
        assert mine[: len(arguments)] == arguments, name
        assert all(extra.endswith("=") for extra in mine[len(arguments) :]), name


@pytest.mark.nightly
@needs_wheel
def test_the_record_is_what_the_package_does(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "compat_peer.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env=os.environ | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
    )
    assert json.loads(done.stdout.strip().splitlines()[-1]) == json.loads(RECORDED.read_text())


def test_the_names_are_all_there() -> None:
    theirs = {
        *compat_scenarios.FUNCTIONS,
        *compat_scenarios.METHODS,
        "StorageKeyNotFoundError",
    }
    assert theirs <= set(tq.__all__)
    assert all(hasattr(tq, name) for name in tq.__all__)
    assert tq.__all__ == sorted(tq.__all__)


# --------------------------------------------------------------------------------
# Errors where 0.1.11 loses data
def test_reads_are_strict(client: tq.TransferQueueClient) -> None:
    tq.kv_batch_put(["a", "b"], "p", rows(2))
    tq.kv_put("a", "p", {"only_a": torch.tensor([1.0])})
    with pytest.raises(tq.StorageKeyNotFoundError, match="ghost"):
        tq.kv_batch_get(["a", "ghost"], "p")
    with pytest.raises(tq.StorageKeyNotFoundError, match="never"):
        tq.kv_batch_get(["a", "b"], "p", ["x", "never"])
    # All fields of rows with different fields: the fields that these rows have in common.
    assert list(tq.kv_batch_get(["a", "b"], "p").keys()) == ["x"]
    assert sorted(tq.kv_batch_get("a", "p").keys()) == ["only_a", "x"]
    assert list(tq.kv_batch_get("b", "p").keys()) == ["x"]
    meta = client.kv_retrieve_meta(["a", "b"], "p")
    with pytest.raises(tq.FieldNotFoundError, match="never"):
        meta.select_fields(["x", "never"])
    with pytest.raises(tq.KeyNotFoundError, match=r"\[999\]"):
        client.kv_retrieve_keys([999], "p")


def test_a_put_that_is_refused_stores_nothing(client: tq.TransferQueueClient) -> None:
    with pytest.raises(DuplicateKeyError):
        tq.kv_batch_put(["a", "a"], "p", rows(2))
    for unknown in (object(), {1, 2}, {"deep": [{3}]}, {(1, 2): 3}, 1j, b"x".join, 1 << 70):
        with pytest.raises(SchemaError, match="Tag 'odd'"):
            tq.kv_put("a", "p", {"x": torch.tensor([1])}, {"odd": unknown})
        with pytest.raises(SchemaError, match=r"'o'.*[Rr]ow 0"):
            tq.kv_put("a", "p", {"o": unknown})
    with pytest.raises(BatchError, match="'l' has 3 values, the batch has 2 rows"):
        tq.kv_batch_put(["a", "b"], "p", TensorDict({"l": NonTensorData([1, 2, 3])}, batch_size=[2]))
    with pytest.raises(BatchError, match="nested"):
        tq.kv_put("a", "p", {"x": torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)})
    with pytest.raises(BatchError, match="data_parser must keep"):
        tq.kv_put("a", "p", {"x": torch.tensor([1])}, data_parser=lambda fields: fields.clear())
    assert tq.kv_list() == {}


def test_fields_that_are_no_tensors_come_back_as_they_are_with_0_1_11(client: tq.TransferQueueClient) -> None:
    """A list, a stack or an array gives one value per row; any other value is for all rows."""
    fields = {
        "text": ["a", "\u00fc"],
        "raw": np.array([b"x", b"yz"]),
        "objects": np.array(["s", {"k": (1, 2)}], dtype=object),
        "stack": NonTensorStack({"n": None}, [1.5, True]),
        "lists": NonTensorData([[1], [2, 3]], batch_size=(2,)),
        "same": "for all",
    }
    tq.kv_batch_put(["a", "b"], "p", TensorDict(fields, batch_size=[2]))
    got = tq.kv_batch_get(["b", "a"], "p")
    # Iterating over a TensorDict itself yields rows.
    assert {name: got.get(name).tolist() for name in got.keys()} == {  # noqa: SIM118
        "text": ["\u00fc", "a"],
        "raw": [b"yz", b"x"],
        "objects": [{"k": [1, 2]}, "s"],
        "stack": [[1.5, True], {"n": None}],
        "lists": [[2, 3], [1]],
        "same": ["for all", "for all"],
    }


def test_tags_hold_what_fields_hold(client: tq.TransferQueueClient) -> None:
    tag = {
        "np": np.float32(0.5),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "scalar": torch.tensor(2.0),
        "array0": np.array(7),
        "list": ["a", {"b": [1, None]}],
        "bytes": b"\x00\xff",
        "text": "\x00 not ours",
        "most": (1 << 64) - 1,
        "row": torch.tensor([1, 2]),
    }
    plain = {"np": 0.5, "count": 3, "flag": True, "scalar": 2.0, "array0": 7}
    given = tq.kv_put("a", "p", {"x": torch.tensor(1)}, tag).tags[0]
    for got in (given, tq.kv_list("p")["p"]["a"], client.kv_retrieve_meta("a", "p").custom_meta[0]):
        assert {name: got[name] for name in plain} == plain
        assert [type(got[name]) for name in plain] == [float, int, bool, float, int]
        assert [got[name] for name in ("list", "bytes", "text")] == [tag["list"], tag["bytes"], tag["text"]]
        assert got["most"] == tag["most"]
        assert got["row"].tolist() == [1, 2]
    client.portal.run(client.session.plane.put("q", ["a"], tags=[{"foreign": "\x00 not base64"}]))
    with pytest.raises(WireError, match="foreign"):
        tq.kv_list("q")


def test_metadata_of_recreated_rows_is_stale(client: tq.TransferQueueClient) -> None:
    tq.kv_batch_put(["a", "b"], "p", rows(2))
    meta = client.kv_retrieve_meta(["a", "b"], "p")
    tq.kv_clear("a", "p")
    with pytest.raises(tq.StorageKeyNotFoundError, match="cleared"):
        client.put(rows(2, "y"), meta)
    tq.kv_put("a", "p", {"x": torch.tensor(7)})
    with pytest.raises(tq.StorageKeyNotFoundError):
        client.get_data(meta)
    client.clear_samples(meta)
    assert tq.kv_list("p") == {"p": {"a": {}}}
    assert tq.kv_batch_get("a", "p").get("x").tolist() == [7]


def test_tensors_arrays_and_other_records_inside_objects(client: tq.TransferQueueClient) -> None:
    record = {
        "pixels": torch.ones(2, 3, dtype=torch.bfloat16),
        "grid": np.arange(6).reshape(2, 3),
        "n": np.float32(1.5),
    }
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"o": NonTensorStack(record, None)}, batch_size=[2]))
    got = tq.kv_batch_get("a", "p").get("o").tolist()[0]
    assert torch.equal(got["pixels"], torch.ones(2, 3, dtype=torch.bfloat16))
    assert np.array_equal(got["grid"], record["grid"])
    assert got["n"] == 1.5


# PyTorch warns when a nested tensor with the strided layout is created.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_may_differ_in_shape_element_type_and_kind(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    strided = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(1, 3)])
    tq.kv_batch_put(["a", "b"], "p", TensorDict({"x": strided}, batch_size=[2]))
    assert [list(row.shape) for row in tq.kv_batch_get(["b", "a"], "p").get("x").unbind()] == [[1, 3], [2, 3]]
    both = [torch.ones(2, 3), torch.zeros(1, 4)]
    tq.kv_batch_put(["a", "b"], "q", TensorDict({"x": torch.nested.nested_tensor(both)}, batch_size=[2]))
    got = tq.kv_batch_get(["b", "a"], "q").get("x")
    assert (got.layout, [row.tolist() for row in got.unbind()]) == (torch.strided, [both[1].tolist(), both[0].tolist()])
    tq.kv_put("a", "r", {"x": torch.tensor([0.5, 1.5]), "y": torch.tensor(1.5), "z": torch.tensor([1])})
    tq.kv_put("b", "r", {"x": torch.tensor([1, 2]), "y": torch.tensor(2), "z": "text"})

    def check() -> None:
        got = tq.kv_batch_get(["b", "a"], "r")
        assert [(row.dtype, row.tolist()) for row in got["x"].unbind()] == [
            (torch.float64, [1, 2]),
            (torch.float64, [0.5, 1.5]),
        ]
        assert got["y"].tolist() == [2, 1.5]
        text, tensor = got.get("z").tolist()
        assert (text, tensor.tolist()) == ("text", [1])
        assert client.get_data(client.kv_retrieve_meta(["b", "a"], "r"))["y"].tolist() == [2, 1.5]

    check()
    tq.save_checkpoint(tmp_path / "c")
    tq.kv_clear(["a", "b"], "r")
    tq.load_checkpoint(tmp_path / "c")
    check()


def test_nothing_is_unpickled(client: tq.TransferQueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def poisoned(*_: object, **__: object) -> object:
        raise AssertionError("something was unpickled")

    for name in ("loads", "load", "Unpickler"):
        monkeypatch.setattr(pickle, name, poisoned)
    compat_scenarios.run(tq, tmp_path)


# --------------------------------------------------------------------------------
# Fetching
def test_get_meta_waits_for_the_event_until_its_deadline(
    client: tq.TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(tq.NotReadyError, match=r"within 0\.3"):
        client.get_meta(["x"], 1, "p", task_name="t")
    monkeypatch.setattr(client._session.settings, "fetch_timeout_s", 60.0)

    async def main() -> list[int]:
        waiting = asyncio.ensure_future(client.async_get_meta(["x"], 2, "p", task_name="t"))
        await asyncio.sleep(0.05)
        await client.async_put(rows(2), partition_id="p")
        return (await client.async_get_data(await waiting)).get("x").tolist()

    assert asyncio.run(main()) == [0, 1]
    with pytest.raises(BatchError, match="mode"):
        client.get_meta(["x"], 1, "p", mode="guess")
    assert client.get_meta(["x", "y"], 2, "p", mode="force_fetch").production_status.tolist() == [0, 0]
    inserted = client.get_meta(["x"], 1, "p", mode="insert")
    assert (inserted.size, inserted.is_ready, inserted.field_names) == (1, False, ["x"])
    for size in (-1, 2**62):
        with pytest.raises(BatchError, match=rf"inserts 0 to 1000000 rows a call; got batch_size={size}\."):
            client.get_meta(["x"], size, "p", mode="insert")


def fetch(rank: int) -> list[int]:
    client = tq.get_client()
    told = {"dp_rank": rank, "batch_index": 0}
    return client.get_data(client.get_meta(["x"], 2, "p", task_name="t", sampling_config=told)).get("x").tolist()


CHILD = f"""
import json
import rl_transferqueue.compat as tq
{inspect.getsource(fetch)}
tq.kv_put("child", "told", tag={{"n": 1}})
print(json.dumps([fetch(0), fetch(1)]))
"""


@pytest.mark.usefixtures("no_plane")
def test_processes_of_one_rank_get_the_same_rows_and_ranks_share_nothing() -> None:
    tq.init({"controller": {"sampler": "RankAwareSampler"}, "rl_transferqueue": {"capacity_mb": 32, "segment_mb": 1}})
    try:
        tq.get_client().put(rows(4), partition_id="p")
        mine = fetch(0)
        done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        same, other = json.loads(done.stdout.strip().splitlines()[-1])
        assert same == mine
        assert sorted([*mine, *other]) == [0, 1, 2, 3]
        assert fetch(1) == other
        assert tq.kv_list("told") == {"told": {"child": {"n": 1}}}
    finally:
        tq.close()


@pytest.mark.usefixtures("no_plane")
def test_groups_are_balanced_over_ranks_and_users_bring_their_own_sampler() -> None:
    class Longest(tq.BaseSampler):
        """Takes the longest rows and marks only those longer than 5 as consumed."""

        def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Any:
            tags = kwargs["partition"].get_custom_meta(ready_indexes)
            chosen = sorted(ready_indexes, key=lambda i: -tags[i]["total_lengths"])[:batch_size]
            return chosen, [i for i in chosen if tags[i]["total_lengths"] > 5]

    settings = {"rl_transferqueue": {"capacity_mb": 32, "segment_mb": 1}}
    lengths = [1, 2, 9, 9, 5, 5, 6, 6]

    def fill(client: tq.TransferQueueClient) -> None:
        meta = client.put(rows(8), partition_id="p")
        meta.update_custom_meta([{"total_lengths": n} for n in lengths])
        client.set_custom_meta(meta)

    tq.init(settings | {"controller": {"sampler": tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)}})
    try:
        client = tq.get_client()
        fill(client)
        shares = [
            client.get_data(
                client.get_meta(["x"], 4, "p", task_name="t", sampling_config={"dp_rank": r, "batch_index": 0})
            )
            .get("x")
            .tolist()
            for r in (1, 0)
        ]
        # 3 + 18 and 10 + 12 tokens, which is how 0.1.11 distributes them.
        assert shares == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert client.check_consumption_status("t", "p")
    finally:
        tq.close()
    tq.init(settings | {"controller": {"sampler": Longest}})
    try:
        client = tq.get_client()
        fill(client)
        first = client.get_data(client.get_meta(["x"], 3, "p", task_name="t")).get("x").tolist()
        assert sorted(first[:2]) == [2, 3]
        assert sorted(client.get_data(client.get_meta(["x"], 3, "p", task_name="t")).get("x").tolist())[:1] == [4]
    finally:
        tq.close()


@pytest.mark.usefixtures("no_plane")
def test_polling_mode_answers_at_once() -> None:
    tq.init({"controller": {"polling_mode": True}, "rl_transferqueue": {"capacity_mb": 32, "segment_mb": 1}})
    try:
        assert tq.get_client().get_meta(["x"], 1, "p", task_name="t").size == 0
    finally:
        tq.close()


# --------------------------------------------------------------------------------
# Lifecycle
@pytest.mark.usefixtures("no_plane")
def test_without_init_there_is_nothing() -> None:
    with pytest.raises(tq.NotInitializedError, match=r"init\(\)"):
        tq.kv_list()
    with pytest.raises(AssertionError):  # as in 0.1.11
        tq.get_client()
    tq.close()


IN_RAY = """
import os
import ray
import rl_transferqueue.compat as tq

ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)  # before init: the workers do not inherit its variable
tq.init({"rl_transferqueue": {"capacity_mb": 32, "segment_mb": 1, "timeout_s": 240}})

@ray.remote
def work():
    import rl_transferqueue.compat as tq
    inherited = "RL_TRANSFERQUEUE_PLANE" in os.environ
    tq.kv_put("a", "p", tag={"n": 1})
    board = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    conf = ray.get(board.get_config.remote())
    assert conf.controller.zmq_info == tq.get_client().descriptor.to_json()
    assert conf["backend"]["SimpleStorage"]["num_data_storage_units"] == 2
    return inherited, tq.kv_list("p")

print(ray.get(work.remote(), timeout=240), tq.kv_list("p"))
tq.close()
try:
    ray.get_actor("TransferQueueController", namespace="transfer_queue")
except ValueError:
    print("withdrawn")
ray.shutdown()
"""


@pytest.mark.slow
def test_ray_workers_find_the_plane_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IN_RAY],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env=os.environ | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
    )
    assert done.stdout.split("\n")[:2] == ["(False, {'p': {'a': {'n': 1}}}) {'p': {'a': {'n': 1}}}", "withdrawn"], (
        done.stderr
    )


@pytest.mark.parametrize(
    ("conf", "what"),
    [
        ({"backend": {"storage_backend": "MooncakeStore"}}, "storage_backend"),
        ({"controller": {"sampler": "GuessingSampler"}}, "GuessingSampler"),
        ({"rl_transferqueue": {"capacity": 3}}, "capacity"),
        ({"backend": {"SimpleStorage": {"ssd_offload": {"enabled": True}}}}, "ssd_offload"),
        ({"metrics": {"enabled": True, "port": 1 << 20}}, "1048576"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(conf: dict[str, Any], what: str, no_plane: None) -> None:
    with pytest.raises(ConfigError, match=what):
        tq.init(conf)


@pytest.mark.usefixtures("no_plane")
def test_every_process_finds_the_metrics_of_the_plane() -> None:
    assert tq.get_metrics_endpoint() is None
    conf = tq.init({"metrics": {"enabled": True}, "rl_transferqueue": {"capacity_mb": 32, "segment_mb": 1}})
    endpoint = tq.get_metrics_endpoint()
    assert endpoint is not None
    assert endpoint == conf.metrics.endpoint
    tq.kv_put("a", "p", tag={"n": 1})
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=60) as page:
        assert 'rl_tq_rows{partition="p"} 1.0' in page.read().decode()
    asked = "import rl_transferqueue.compat as tq; print(tq.get_metrics_endpoint())"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == endpoint, done.stderr
    tq.close()
    assert tq.get_metrics_endpoint() is None
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=60)


SETTINGS = """
import json
import rl_transferqueue.compat as tq

conf = tq.init({"controller": {"fetch_timeout_s": 9.0}})
units = conf.backend.SimpleStorage.num_data_storage_units
sampler = conf.controller.sampler
print(json.dumps([units, conf["rl_transferqueue"], conf.controller.polling_mode, conf.controller.fetch_timeout_s,
                  type(sampler).__name__, vars(sampler)["n_samples_per_prompt"]]))
"""


@pytest.mark.usefixtures("no_plane")
def test_init_returns_the_settings_of_the_plane_that_another_process_started() -> None:
    own = {"capacity_mb": 32, "segment_mb": 1}
    tq.init(
        {
            "controller": {"sampler": tq.GRPOGroupNSampler(n_samples_per_prompt=2), "fetch_timeout_s": 0.5},
            "backend": {"SimpleStorage": {"num_data_storage_units": 1}},
            "rl_transferqueue": own,
        }
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", SETTINGS], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [1, own, False, 0.5, "GRPOGroupNSampler", 2]
    finally:
        tq.close()


@pytest.mark.usefixtures("no_plane")
def test_a_plane_that_has_ended_is_not_attached_to(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"rl_transferqueue": {"capacity_mb": 32, "segment_mb": 1}}
    tq.init(settings)
    told = os.environ[lifecycle.PLANE_VARIABLE]
    tq.close()
    monkeypatch.setenv(lifecycle.PLANE_VARIABLE, told)
    with pytest.raises(tq.NotInitializedError, match=r"init\(\)"):
        tq.kv_list()
    tq.init(settings)
    assert tq.kv_list() == {}
    plane = lifecycle._here().plane  # pyright: ignore[reportPrivateUsage]
    assert plane is not None
    plane.close()  # simulates a crash
    with pytest.raises(PlaneLostError):
        tq.kv_list()
    tq.init(settings)
    assert tq.kv_list() == {}
    monkeypatch.setenv(lifecycle.PLANE_VARIABLE, "not json")
    tq.close()


def test_a_damaged_checkpoint_is_refused(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    tq.kv_batch_put(["a", "b"], "p", rows(2), [{"n": 1}, {"n": 2}])
    tq.save_checkpoint(tmp_path / "c")
    tq.save_checkpoint(tmp_path / "c", metadata={"step": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]
    assert json.loads((tmp_path / "c" / "metadata.json").read_text())["user_metadata"] == {"step": 2}
    index = tmp_path / "c" / "controller_state.msgpack"
    # A pickle, then text that is not UTF-8.
    for damage in (b"\x80\x04]garbage", index.read_bytes().replace(b"\xa1p", b"\xa1\xff")):
        index.write_bytes(damage)
        with pytest.raises(WireError, match="controller_state"):
            tq.load_checkpoint(tmp_path / "c")
    assert tq.kv_list("p") == {"p": {"a": {"n": 1}, "b": {"n": 2}}}
    with pytest.raises(FileNotFoundError):
        tq.load_checkpoint(tmp_path / "ghost")


def test_a_save_that_was_cut_short_between_its_renames_is_found(client: tq.TransferQueueClient, tmp_path: Path) -> None:
    tq.kv_put("a", "p", tag={"n": 1})
    tq.save_checkpoint(tmp_path / "c")
    (tmp_path / "c").rename(tmp_path / "c.old")
    tq.kv_clear("a", "p")
    tq.load_checkpoint(tmp_path / "c")
    assert tq.kv_list("p") == {"p": {"a": {"n": 1}}}
