"""The options of a dataclass with nested groups, by dotted key, and what each of them needs."""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator, Mapping
from typing import Any, cast

from rl_protocol.support.options import Condition, OptionSpec, Resume, spec_of
from rl_protocol.support.plugins import installed_plugins

_CONDITION = re.compile(r"(?P<no>!?)(?P<key>[\w.]+)(?:(?P<sign>!=|=|>)(?P<value>.*))?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a tree of groups."""

    key: str
    """Its name after those of its groups, as in `actor.optim.lr`."""
    type: str
    default: object
    spec: OptionSpec
    kind: type[Any]
    """The dataclass of its group."""
    needs: tuple[tuple[str, str], ...]
    """Conditions of its groups and its own: (group that it is seen from, condition)."""
    resume: Resume
    verl: tuple[str, ...]
    """Full keys of verl's configuration whose values mean the same."""

    @property
    def is_list(self) -> bool:
        """Whether its value is a tuple."""
        return isinstance(self.default, tuple)


@functools.cache
def list_options(kind: type[Any]) -> tuple[Option, ...]:
    """Every option of a dataclass and its groups, in order."""
    return tuple(_walk(kind, "", (), "fixed", ()))


@functools.cache
def list_groups(kind: type[Any]) -> Mapping[str, str]:
    """Key of every group in order -> its meaning; that of the root is empty."""
    return dict(_walk_groups(kind, "", (kind.__doc__ or "").partition("\n")[0]))


def _walk_groups(kind: type[Any], path: str, help: str) -> Iterator[tuple[str, str]]:
    yield path, help
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            key = f"{path}.{field.name}" if path else field.name
            yield from _walk_groups(cast(type[Any], hints[field.name]), key, spec_of(field).help)


def _walk(
    kind: type[Any], path: str, needs: tuple[tuple[str, str], ...], resume: Resume, verl: tuple[str, ...]
) -> Iterator[Option]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        spec, key, hint = spec_of(field), path + field.name, hints[field.name]
        grouped = dataclasses.is_dataclass(hint)
        around = f"{key}." if grouped else path
        own = (*needs, *((around, need) for need in spec.needs))
        same = tuple(_verl_keys(field.name, spec.verl, verl))
        if grouped:
            yield from _walk(cast(type[Any], hint), around, own, spec.resume or resume, same)
        else:
            yield Option(
                key=key,
                type=_name(hint),
                default=field.default,
                spec=spec,
                kind=kind,
                needs=own,
                resume=spec.resume or resume,
                verl=same,
            )


def _verl_keys(own: str, names: tuple[str, ...], groups: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        inside = f".{own}" if name == "." else name
        yield from (f"{group}{inside}" for group in groups) if name.startswith(".") else (name,)


def _name(hint: Any) -> str:
    return f"list of {typing.get_args(hint)[0].__name__}" if typing.get_origin(hint) is tuple else hint.__name__


def unmet_need(root: object, option: Option) -> str:
    """What must be set for anything to read the option; empty if something reads it.

    A condition is `key=value`, `key!=value`, `key>number`, `key` (true or not empty) or `!key`;
    values may be alternatives as in `a|b`, and conditions too, as in `key or other=value`. A key is
    looked up in the option's group, then in the groups around it. A condition on a key that no
    group has, or on the option itself, holds. So does `key=value` for a value from an installed
    package, which may read any option.

    Args:
        root: the dataclass at the root of the tree.
        option: one of its `list_options`.
    """
    for path, need in option.needs:
        alternatives = need.split(" or ")
        unmet = [words for one in alternatives if (words := _unmet(root, option, path, one))]
        if len(unmet) == len(alternatives):
            return " or ".join(unmet)
    return ""


def _unmet(root: object, option: Option, path: str, text: str) -> str:
    """What must be set for one condition to hold; empty if it holds."""
    match = _CONDITION.fullmatch(text)
    assert match is not None, f"{option.key} needs {text!r}, which is no condition"
    found = resolve_key(root, path, match["key"])
    if found is None or found[0] == option.key:
        return ""
    key, value = found
    if named := _condition_text(root, key):
        return "" if value else named
    negated, sign, wanted = bool(match["no"]), match["sign"], (match["value"] or "").split("|")
    if sign is None:
        return "" if bool(value) != negated else _words(key, value, empty=negated)
    if sign == ">":
        return "" if value > float(wanted[0]) else f"{key} greater than {wanted[0]}"
    if sign == "!=":
        return "" if str(value) not in wanted else f"another {key} than {value}"
    return "" if str(value) in wanted or _installed(root, key, value) else f"{key}={' or '.join(wanted)}"


def resolve_key(root: object, path: str, name: str) -> tuple[str, Any] | None:
    """The full key and the value of an option or `Condition` seen from a group; None: unknown.

    >>> class Loop:
    ...     seed = 1
    >>> class Run:
    ...     model, loop = "m", Loop()
    >>> resolve_key(Run(), "loop.", "seed"), resolve_key(Run(), "loop.", "model")
    (('loop.seed', 1), ('model', 'm'))
    """
    groups = path.removesuffix(".").split(".") if path else []
    for depth in range(len(groups), -1, -1):
        parts = [*groups[:depth], *name.split(".")]
        value = functools.reduce(lambda node, part: getattr(node, part, None), parts, cast(Any, root))
        if value is not None:
            return ".".join(parts), value
    return None


def _condition_text(root: object, key: str) -> str:
    *groups, name = key.split(".")
    owner = functools.reduce(getattr, groups, root)
    found = getattr(type(owner), name, None)
    return found.text if isinstance(found, Condition) else ""


def _words(key: str, value: object, *, empty: bool) -> str:
    if isinstance(value, bool):
        return f"{key}={str(not empty).lower()}"
    return f"{key} empty" if empty else key


def _installed(root: object, key: str, value: object) -> bool:
    """Whether an installed package offers the value of that key."""
    spec = next((option.spec for option in list_options(type(root)) if option.key == key), None)
    group = spec.plugins if spec else ""
    return bool(group) and value in {entry.name for entry in installed_plugins(group)}
