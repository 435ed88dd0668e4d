"""The experts of a mixture-of-experts model that computed each token of a sequence.

They are int16 [tokens, layers, K], for the tokens in their order, the layers that have experts, and
the K experts of a token in a layer, in the order of the router: numbers from 0, all different.
A token has none in a layer where all K are -1; a sequence has none where `layers` is 0.

Only tokens that a forward pass computed have experts: of a prompt of P tokens and a response of R
these are the first P + R - 1, since nothing follows the last one; without a response all P.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rl_protocol.errors import BatchError

ExpertIds = npt.NDArray[np.int16]
"""int16 [tokens, layers, K]."""
NOT_RECORDED = -1
"""Number in place of an expert: the router of the model chooses it."""


def computed_tokens(prompt: int, response: int) -> int:
    """Tokens of a sequence that a forward pass computes.

    >>> computed_tokens(3, 2), computed_tokens(3, 0)
    (4, 3)
    """
    return prompt + max(response - 1, 0)


def join_routed(parts: Iterable[ExpertIds | None]) -> ExpertIds | None:
    """Join what was recorded while a sequence grew.

    Each part begins with the first token of the sequence. A token has the experts of the first part
    that has it, which is that of the pass that the next token was sampled from.

    Args:
        parts: in the order of generation; None: nothing was recorded.

    Returns:
        [tokens of the longest part, layers, K]; None: no part was recorded.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return None
    rows, done = list[ExpertIds](), 0
    for part in known:
        rows.append(part[done:])
        done = max(done, len(part))
    return np.concatenate(rows)


def fill_routed(routed: ExpertIds | None, tokens: int) -> ExpertIds:
    """The experts of a sequence of which that many tokens are computed; None: it has none.

    The last ones, after those of `routed`, have none: what an environment answered last is computed
    by no pass of the rollout.
    """
    if routed is None:
        return np.zeros((tokens, 0, 0), np.int16)
    missing = max(tokens - len(routed), 0)
    return np.concatenate([routed, np.full((missing, *routed.shape[1:]), NOT_RECORDED, np.int16)])


def check_experts(routed: ExpertIds, tokens: int, experts: int, name: str) -> None:
    """Check the experts of a sequence.

    Args:
        routed: [tokens, layers, K].
        tokens: of the sequence that a forward pass computes.
        experts: of each layer of the model.
        name: of the sequence, for the error.

    Raises:
        BatchError: their tokens are not as many, or an expert is not from 0 to experts - 1.
    """
    if routed.ndim != 3 or len(routed) != tokens:
        raise BatchError(
            f"{name} has {tokens} tokens with a forward pass, and routed experts of shape {routed.shape}; the first dimension must be {tokens}."
        )
    if routed.size and not (routed.min() >= NOT_RECORDED and routed.max() < experts):
        wrong = int(routed.max()) if routed.max() >= experts else int(routed.min())
        raise BatchError(f"{name} has a routed expert {wrong}, and the model has the experts 0 to {experts - 1}.")
