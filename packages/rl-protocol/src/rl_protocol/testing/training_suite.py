"""Conformance suites of PolicyBackend and CriticBackend: subclass and override `open_...`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.columns import RaggedColumn, ragged
from rl_protocol.ports import CriticBackend, PolicyBackend, WeightSender
from rl_protocol.testing.weights_suite import WeightSenderSuite, bytes_of

PROMPTS = ([2, 3], [4], [5, 4, 3], [2])
RESPONSES = ([5, 1], [3, 3, 3], [2], [4, 1])
TOLERANCE = 1e-4
"""Tolerance for two computations of one number, where floats are added in another order."""


def tokens() -> BatchData:
    """Four trajectories of different lengths over token ids 1..5."""
    return BatchData({"prompts": ragged(PROMPTS, "int64"), "responses": ragged(RESPONSES, "int64")})


def per_token(batch: BatchData, value: float, dtype: str = "float32") -> RaggedColumn:
    """A ragged column with this value at every response token."""
    return ragged([np.full(len(row), value) for row in batch.ragged("responses").rows()], dtype)


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Assert that all metrics are plain finite floats: the driver has neither a GPU nor torch."""
    assert metrics
    for name, value in metrics.items():
        assert type(value) is float, f"{name} is a {type(value).__name__}"
        assert math.isfinite(value)


def check_like_responses(column: RaggedColumn, batch: BatchData) -> None:
    """Assert one finite float32 per response token."""
    assert (column.dtype, column.dims) == ("float32", ())
    assert column.lengths.tolist() == batch.ragged("responses").lengths.tolist()
    assert np.isfinite(column.values).all()


class PolicyBackendSuite(WeightSenderSuite):
    """Tests for a PolicyBackend."""

    def open_policy(self) -> AbstractContextManager[PolicyBackend]:
        """A new policy, with a learning rate large enough that one update has a visible effect."""
        raise NotImplementedError

    def open_sender(self) -> AbstractContextManager[WeightSender]:
        """The policy."""
        return self.open_policy()

    def training_batch(self, policy: PolicyBackend, advantage: float) -> BatchData:
        """The batch for `update`; override for a policy that reads more columns."""
        batch = tokens()
        return BatchData(
            {
                **batch.columns,
                "response_mask": per_token(batch, 1, "bool"),
                "old_log_probs": policy.compute_log_probs(batch, temperature=1.0)["log_probs"],
                "advantages": per_token(batch, advantage),
            }
        )

    def test_one_log_prob_and_entropy_per_response_token(self) -> None:
        with self.open_policy() as policy:
            out = policy.compute_log_probs(tokens(), temperature=1.0)
            assert set(out.field_names) == {"log_probs", "entropy"}
            for name in out.field_names:
                check_like_responses(out.ragged(name), tokens())
            assert (out.ragged("log_probs").values <= TOLERANCE).all()
            assert (out.ragged("entropy").values >= -TOLERANCE).all()

    def test_rows_do_not_influence_each_other(self) -> None:
        with self.open_policy() as policy:
            whole = policy.compute_log_probs(tokens(), temperature=0.7)
            for i in range(len(PROMPTS)):
                alone = policy.compute_log_probs(tokens().slice(i, i + 1), temperature=0.7)
                for name in ("log_probs", "entropy"):
                    assert alone.ragged(name).row(0).tolist() == pytest.approx(
                        whole.ragged(name).row(i).tolist(), abs=TOLERANCE
                    )

    def test_no_rows_are_legal(self) -> None:
        with self.open_policy() as policy:
            assert len(policy.compute_log_probs(tokens().slice(0, 0), temperature=1.0)) == 0

    def test_computing_log_probs_changes_nothing(self) -> None:
        with self.open_policy() as policy:
            before = bytes_of(list(policy.named_weights()))
            policy.compute_log_probs(tokens(), temperature=1.0)
            assert bytes_of(list(policy.named_weights())) == before

    @pytest.mark.parametrize("advantage", [1.0, -1.0])
    def test_an_update_follows_the_sign_of_the_advantage(self, advantage: float) -> None:
        with self.open_policy() as policy:
            batch = self.training_batch(policy, advantage)
            check_metrics(policy.update(batch, temperature=1.0))
            after = policy.compute_log_probs(batch, temperature=1.0).ragged("log_probs").values.mean()
            assert (after - batch.ragged("old_log_probs").values.mean()) * advantage > 0

    def test_a_checkpoint_is_written(self, tmp_path: Path) -> None:
        with self.open_policy() as policy:
            policy.save_pretrained(tmp_path / "checkpoint")
            assert any(path.stat().st_size for path in (tmp_path / "checkpoint").iterdir())


class CriticBackendSuite:
    """Tests for a CriticBackend."""

    def open_critic(self) -> AbstractContextManager[CriticBackend]:
        """A new critic, with a learning rate large enough that a few updates have a visible
        effect."""
        raise NotImplementedError

    def test_one_value_per_response_token(self) -> None:
        with self.open_critic() as critic:
            check_like_responses(critic.compute_values(tokens()).ragged("values"), tokens())
            assert len(critic.compute_values(tokens().slice(0, 0))) == 0

    def test_updates_bring_the_values_nearer_to_the_returns(self) -> None:
        with self.open_critic() as critic:
            batch, target = tokens(), 0.5
            first = critic.compute_values(batch).ragged("values").values
            for _ in range(10):
                columns = {
                    "response_mask": per_token(batch, 1, "bool"),
                    "values": critic.compute_values(batch)["values"],
                    "returns": per_token(batch, target),
                }
                check_metrics(critic.update(BatchData({**batch.columns, **columns})))
            last = critic.compute_values(batch).ragged("values").values
            assert np.square(last - target).mean() < np.square(first - target).mean()
