"""Conformance suites of WeightSender and WeightReceiver: subclass and override `open_...`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import pytest

from rl_protocol.batch.weight_tensor import WeightTensor
from rl_protocol.errors import WeightSyncError
from rl_protocol.ports import WeightCapabilities, WeightReceiver, WeightSender


def bytes_of(weights: Sequence[WeightTensor]) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """Names, types, shapes and bytes of the weights, for comparison."""
    return [(w.name, w.dtype, w.shape, w.data.tobytes()) for w in weights]


class WeightSenderSuite:
    """Tests for a WeightSender."""

    def open_sender(self) -> AbstractContextManager[WeightSender]:
        """A sender with at least one weight, released when the context ends."""
        raise NotImplementedError

    def test_declares_what_it_can_do(self) -> None:
        with self.open_sender() as sender:
            assert isinstance(sender.capabilities, WeightCapabilities)

    def test_names_are_unique_and_come_in_a_fixed_order(self) -> None:
        with self.open_sender() as sender:
            names = [weight.name for weight in sender.named_weights()]
            assert names
            assert len(set(names)) == len(names)
            assert [weight.name for weight in sender.named_weights()] == names

    def test_reading_the_weights_does_not_change_them(self) -> None:
        with self.open_sender() as sender:
            assert bytes_of(list(sender.named_weights())) == bytes_of(list(sender.named_weights()))


class WeightReceiverSuite:
    """Tests for a WeightReceiver."""

    def open_receiver(self) -> AbstractContextManager[tuple[WeightReceiver, Sequence[WeightTensor]]]:
        """A new receiver, and weights that fit it and differ from its own."""
        raise NotImplementedError

    def refused(self, receiver: WeightReceiver, weights: Sequence[WeightTensor], name: str) -> None:
        """Assert that these weights are refused by name and the version stays."""
        before = receiver.weight_version
        with pytest.raises(WeightSyncError, match=name.replace(".", r"\.")):
            receiver.load_weights(weights, before + 1)
        assert receiver.weight_version == before

    def test_declares_what_it_can_do(self) -> None:
        with self.open_receiver() as (receiver, _):
            assert isinstance(receiver.capabilities, WeightCapabilities)

    def test_a_version_becomes_active(self) -> None:
        with self.open_receiver() as (receiver, weights):
            receiver.load_weights(weights, 7)
            assert receiver.weight_version == 7
            receiver.load_weights(iter(weights), 9)
            assert receiver.weight_version == 9

    def test_missing_and_unknown_names_are_refused(self) -> None:
        with self.open_receiver() as (receiver, weights):
            self.refused(receiver, weights[1:], weights[0].name)
            surprise = WeightTensor("no.such.weight", "float32", (1,), np.zeros(4, np.uint8))
            self.refused(receiver, [*weights, surprise], "no.such.weight")

    def test_other_shapes_and_element_types_are_refused(self) -> None:
        with self.open_receiver() as (receiver, weights):
            first = weights[0]
            self.refused(receiver, [replace(first, shape=(*first.shape, 1)), *weights[1:]], first.name)
            flat = WeightTensor(first.name, "uint8", first.shape, np.zeros(int(np.prod(first.shape)), np.uint8))
            self.refused(receiver, [flat, *weights[1:]], first.name)

    def test_a_stream_that_breaks_leaves_the_version_as_it_was(self) -> None:
        def broken(weights: Sequence[WeightTensor]) -> Iterator[WeightTensor]:
            yield weights[0]
            raise WeightSyncError("the sender died")

        with self.open_receiver() as (receiver, weights):
            with pytest.raises(WeightSyncError, match="the sender died"):
                receiver.load_weights(broken(weights), 3)
            assert receiver.weight_version != 3
