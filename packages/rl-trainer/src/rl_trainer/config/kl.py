"""Names of the estimators of the divergence from the reference policy."""

from __future__ import annotations

from rl_protocol import ConfigError
from rl_protocol.support.options import nearest

KL_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
"""verl's other names."""


KL_PENALTIES = ("k1", "k2", "k3", "abs")
"""Estimators for the penalty in the reward."""


KL_LOSSES = (*KL_PENALTIES, *(f"{kind}+" for kind in KL_PENALTIES))
"""Estimators for the loss. With + the value is the estimator's and the gradient that of k2."""


def kl_name(name: str, known: tuple[str, ...], key: str) -> str:
    """The estimator's name, from that name or verl's.

    Raises:
        ConfigError: not one of `known`.
    """
    stem, plus = name.removesuffix("+"), "+" if name.endswith("+") else ""
    found = KL_ALIASES.get(stem, stem) + plus
    if found in known:
        return found
    why = " The full divergence needs the logits of both policies, which do not travel." if stem == "full" else ""
    raise ConfigError(
        f"{key} must be one of {', '.join(known)}; got {name!r}.{why or nearest(name, (*known, *KL_ALIASES))}"
    )
