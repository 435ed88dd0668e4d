"""The number of messages per call: one for a put, none for a get of rows located before."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from polling import until_async

from rl_protocol import BatchData, MissingDataError, dense
from rl_transferqueue import Client, LocalPlane, connect
from rl_transferqueue.wire.messages import AnyRequest


def small(value: int) -> BatchData:
    return BatchData({"x": dense(np.full((2, 4), value, np.int64))})


class Said:
    """Records the messages that a client sends to the controller."""

    def __init__(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[str] = []
        tell = client._controller.tell

        def note(body: AnyRequest) -> int:
            self.requests.append(type(body).__name__)
            return tell(body)

        monkeypatch.setattr(client._controller, "tell", note)

    def take(self) -> list[str]:
        said, self.requests = [name for name in self.requests if name != "ReleaseLeases"], []
        return said


def test_a_put_is_one_message_once_there_is_a_reserve(plane: LocalPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as client:
            said = Said(client, monkeypatch)
            await client.put("p", ["a", "b"], small(0))
            assert said.take() == ["Reserve", "Commit"]
            for i in range(100):
                await client.put("p", ["a", "b"], small(i))
            assert said.take() == ["Commit"] * 100
            await asyncio.gather(*(client.put("p", [f"{i}", f"{i}+"], small(i)) for i in range(50)))
            assert said.take() == ["Commit"] * 50

    asyncio.run(main())


def test_a_get_of_known_rows_sends_no_request_until_they_change(
    plane: LocalPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as reader, await connect(plane.descriptor) as writer:
            one = await writer.put("p", ["a", "b"], small(1))
            two = await writer.put("p", ["c", "d"], small(2))
            said = Said(reader, monkeypatch)
            for meta, value in ((one, 1), (two, 2)):
                for _ in range(5):
                    assert (await reader.get(meta)).dense("x").values.tolist() == [[value] * 4] * 2
                assert said.take() == ["Locate"]
            await writer.put("p", ["c"], BatchData({"x": dense(np.full((1, 4), 3))}))
            assert (await reader.get(one)).dense("x").values[0, 0] == 1
            assert said.take() == []
            assert (await reader.get(two)).dense("x").values[:, 0].tolist() == [3, 2]
            assert said.take() == ["Locate"]
            await writer.clear("p", ["b"])
            with pytest.raises(MissingDataError, match="'b'"):
                await reader.get(one)
            await writer.put("p", ["b"], small(9).slice(0, 1))
            with pytest.raises(MissingDataError, match="'b'"):
                await reader.get(one)

    asyncio.run(main())


def test_what_only_a_cache_remembers_holds_no_memory(plane: LocalPlane) -> None:
    """The memory is freed although the reader makes no further call."""

    async def main() -> None:
        async with await connect(plane.descriptor) as reader, await connect(plane.descriptor) as writer:
            meta = await writer.put("p", ["a", "b"], small(1))
            await reader.get(meta)
            await writer.clear("p")

            async def free() -> bool:
                return not (await writer.stats()).bytes_used

            await until_async(free, "the memory comes back")

    asyncio.run(main())


def test_a_reserve_is_given_back_when_others_need_the_memory(plane: LocalPlane) -> None:
    async def main() -> None:
        async with await connect(plane.descriptor) as one, await connect(plane.descriptor) as two:
            await one.put("p", ["a", "b"], small(1))
            await one.clear("p")
            assert (await two.stats()).bytes_reserved > 0
            unit = plane.descriptor.units[0].arena_bytes
            whole = BatchData({"x": dense(np.zeros((1, unit), np.uint8))})
            for i in range(len(plane.descriptor.units)):
                await two.put("q", [f"{i}"], whole, timeout_s=60)
            assert (await two.stats()).bytes_reserved == 0

    asyncio.run(main())
