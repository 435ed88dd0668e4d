"""The options of nested groups: keys, resume rules, and what each option needs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from rl_protocol.support import option_tree
from rl_protocol.support.option_tree import list_groups, list_options, unmet_need
from rl_protocol.support.options import Options, condition, group, option


@dataclass(frozen=True, kw_only=True)
class Loss(Options):
    mode: str = option("plain", "loss", plugins="some.losses")
    tau: float = option(1.0, "temperature", needs="mode=gate|soft")
    coef: float = option(1.0, "coefficient", needs="use_kl or actor.weight>0", verl=(".coeff", "other.coef"))


@dataclass(frozen=True, kw_only=True)
class Actor(Options):
    weight: int = option(0, "weight", resume="free", verl=".")
    loss: Loss = group(Loss, "loss", verl=".policy_loss")
    packed: bool = option(False, "pack", needs=("engine!=big", "!files"))


@dataclass(frozen=True, kw_only=True)
class Lora(Options):
    rank: int = option(0, "rank", resume="fixed")
    alpha: int = option(1, "alpha")


@dataclass(frozen=True, kw_only=True)
class Run(Options):
    """A run."""

    engine: str = option("small", "engine", choices=("small", "big"), resume="silent")
    files: str = option("", "files")
    use_kl: bool = option(False, "kl")
    slow: int = option(0, "slow", needs="takes_long")
    actor: Actor = group(Actor, "actor", verl=("models.actor", "actor"))
    lora: Lora = group(Lora, "adapters", needs="rank>0", resume="free")

    @condition("a file, or another engine")
    def takes_long(self) -> bool:
        return bool(self.files)


def need(key, root=None):
    root = root or Run()
    (found,) = [one for one in list_options(type(root)) if one.key == key]
    return unmet_need(root, found)


def test_options_have_full_keys_in_order_and_the_rules_of_their_groups():
    found = {one.key: one for one in list_options(Run)}
    assert list(found)[:5] == ["engine", "files", "use_kl", "slow", "actor.weight"]
    assert found["actor.loss.tau"].type == "float"
    rules = {key: found[key].resume for key in ("engine", "files", "actor.weight", "lora.rank", "lora.alpha")}
    assert rules == {
        "engine": "silent",
        "files": "fixed",
        "actor.weight": "free",
        "lora.rank": "fixed",
        "lora.alpha": "free",
    }


@pytest.mark.parametrize(
    ("key", "without", "with_it", "words"),
    [
        ("actor.loss.tau", {}, {"actor": Actor(loss=Loss(mode="soft"))}, "actor.loss.mode=gate or soft"),
        ("actor.loss.coef", {}, {"use_kl": True}, "use_kl=true or actor.weight greater than 0"),
        ("actor.loss.coef", {}, {"actor": Actor(weight=1)}, "use_kl=true or actor.weight greater than 0"),
        ("actor.packed", {"engine": "big"}, {}, "another engine than big"),
        ("actor.packed", {"files": "a"}, {}, "files empty"),
        ("lora.alpha", {}, {"lora": Lora(rank=1)}, "lora.rank greater than 0"),
        ("slow", {}, {"files": "a"}, "a file, or another engine"),
    ],
)
def test_what_nothing_reads_names_what_it_needs(key, without, with_it, words):
    assert need(key, Run(**without)) == words
    assert need(key, Run(**with_it)) == ""


def test_groups_have_full_keys_in_order_and_a_meaning():
    assert list_groups(Run) == {"": "A run.", "actor": "actor", "actor.loss": "loss", "lora": "adapters"}


def test_verls_keys_of_an_option_are_in_verls_counterparts_of_its_groups():
    found = {one.key: one.verl for one in list_options(Run)}
    assert found["actor.weight"] == ("models.actor.weight", "actor.weight")
    assert found["actor.loss.coef"] == (
        "models.actor.policy_loss.coeff",
        "actor.policy_loss.coeff",
        "other.coef",
    )
    assert found["actor.loss.tau"] == found["engine"] == ()


def test_an_option_does_not_need_itself_and_a_group_alone_needs_nothing_from_others():
    assert need("lora.rank") == ""
    assert need("packed", Actor()) == ""  # without the run there is no engine to ask for
    assert need("loss.tau", Actor()) == "loss.mode=gate or soft"


def test_an_installed_value_may_read_any_option(monkeypatch):
    offered = EntryPoint(name="mine", value="a:b", group="some.losses")
    monkeypatch.setattr(option_tree, "installed_plugins", lambda group: [offered] if group == "some.losses" else [])
    assert need("actor.loss.tau", Run(actor=Actor(loss=Loss(mode="mine")))) == ""
    assert need("actor.loss.tau", Run(actor=Actor(loss=Loss(mode="other")))) == "actor.loss.mode=gate or soft"
