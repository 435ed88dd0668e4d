"""Options: dataclass fields that declare help, bounds and choices, and are checked when built.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True, kw_only=True)
... class Adam(Options):
...     lr: float = option(1e-6, "learning rate", gt=0)
>>> Adam(lr=-1.0)
Traceback (most recent call last):
    ...
rl_protocol.errors.ConfigError: lr must be greater than 0; got -1.0.
>>> build(Adam, {"lr": -1.0}, path="critic.optim.")
Traceback (most recent call last):
    ...
rl_protocol.errors.ConfigError: critic.optim.lr must be greater than 0; got -1.0.

`rl_protocol.support.option_tree` lists the options of nested groups.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import numbers
import typing
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Literal, TypeVar, cast, overload

from rl_protocol.errors import ConfigError

T = TypeVar("T")
Resume = Literal["fixed", "free", "silent"]
"""Whether a resumed run may change an option; silent: the change is not reported."""
_KEY = "option"
_PATH: ContextVar[str] = ContextVar("path of the group that is being built", default="")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """What a field declares besides its type and default; see `option`."""

    help: str
    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None
    choices: tuple[str, ...] = ()
    plugins: str = ""
    needs: tuple[str, ...] = ()
    resume: Resume | None = None
    verl: tuple[str, ...] = ()

    def check(self, key: str, value: object) -> None:
        """Check a value, or each value of a list.

        Raises:
            ConfigError: it is not a choice, or out of bounds; names the key.
        """
        for one in cast(tuple[object, ...], value) if isinstance(value, tuple) else (value,):
            self._check_one(key, one)

    def _check_one(self, key: str, value: object) -> None:
        if self.choices and value not in self.choices:
            rule = f"{'empty or ' if '' in self.choices else ''}one of {', '.join(filter(None, self.choices))}"
            raise ConfigError(f"{key} must be {rule}; got {value!r}.{nearest(str(value), self.choices)}")
        if self.bounds:
            require(self._within(cast(float, value)), key, self.bounds, value)
        require(not (isinstance(value, float) and math.isnan(value)), key, "a number", value)

    @property
    def bounds(self) -> str:
        """The bounds in words, such as "in [0, 1)"; empty without bounds."""
        low, high = (self.gt if self.ge is None else self.ge), (self.lt if self.le is None else self.le)
        if low is not None and high is not None and high < math.inf:
            return f"in {'[' if self.gt is None else '('}{low}, {high}{']' if self.lt is None else ')'}"
        words = [f"at least {low}" if self.gt is None else f"greater than {low}"] if low is not None else []
        if high is not None:
            words.append("finite" if high == math.inf else f"{'at most' if self.lt is None else 'less than'} {high}")
        return " and ".join(words)

    def _within(self, value: float) -> bool:
        # written so that nan is out of any bounds
        return (
            (self.gt is None or value > self.gt)
            and (self.ge is None or value >= self.ge)
            and (self.lt is None or -math.inf < value < self.lt)
            and (self.le is None or value <= self.le)
        )


def option(
    default: Any,
    help: str,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    choices: Iterable[str] = (),
    plugins: str = "",
    needs: str | tuple[str, ...] = (),
    resume: Resume | None = None,
    verl: str | tuple[str, ...] = (),
) -> Any:
    """A dataclass field for one option.

    Args:
        default: its default.
        help: its meaning, for `--help`.
        gt: the value must be greater than this.
        ge: the value must be at least this.
        lt: the value must be less than this; inf: finite.
        le: the value must be at most this.
        choices: the values there are.
        plugins: entry point group of installed packages that offer further values.
        needs: conditions, all of which must hold for anything to read the option; see
            `rl_protocol.support.option_tree.unmet_need`.
        resume: whether a resumed run may change it; None: as its group says, or else fixed.
        verl: keys of verl's configuration whose values mean the same. One that starts with a dot
            is in verl's counterpart of the group, and "." has the option's own name there.
    """
    spec = OptionSpec(
        help=help,
        gt=gt,
        ge=ge,
        lt=lt,
        le=le,
        choices=tuple(choices),
        plugins=plugins,
        needs=_several(needs),
        resume=resume,
        verl=_several(verl),
    )
    return dataclasses.field(default=default, metadata={_KEY: spec})


def group(
    kind: type[Any],
    help: str,
    *,
    needs: str | tuple[str, ...] = (),
    resume: Resume | None = None,
    verl: str | tuple[str, ...] = (),
) -> Any:
    """A dataclass field for a group of options, an instance of the dataclass `kind`.

    `needs` and `resume` are those of `option`, for all options of the group. `verl` names verl's
    counterparts of the group, in the forms of `option`.
    """
    spec = OptionSpec(help=help, needs=_several(needs), resume=resume, verl=_several(verl))
    return dataclasses.field(default_factory=kind, metadata={_KEY: spec})


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


class Condition:
    """A property of an `Options` class that `needs` may name.

    >>> class Rewards(Options):
    ...     function = "exact_match"
    ...     @condition("a function other than exact_match")
    ...     def timed(self) -> bool:
    ...         return self.function != "exact_match"
    >>> Rewards.timed.text
    'a function other than exact_match'
    """

    def __init__(self, holds: Callable[[Any], bool], text: str) -> None:
        self._holds = holds
        self.text = text
        """What to set for it to hold."""

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Condition: ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> bool: ...
    def __get__(self, instance: object, owner: type[Any]) -> bool | Condition:
        return self if instance is None else self._holds(instance)


def condition(text: str) -> Callable[[Callable[[Any], bool]], Condition]:
    """Make a method a `Condition`; `text` says what to set for it to hold."""
    return lambda holds: Condition(holds, text)


def spec_of(field: dataclasses.Field[Any]) -> OptionSpec:
    """What an `option` or `group` declares."""
    return field.metadata[_KEY]


class Options:
    """Base of a dataclass of options, which are checked when it is built.

    Keys in messages start with the path of the group that `build` was given; they are plain names
    without it. `help()` of the class has the help of each option.
    """

    def __init_subclass__(cls) -> None:
        """Add the options to the docstring."""
        super().__init_subclass__()
        fields = {name: value for name, value in vars(cls).items() if isinstance(value, dataclasses.Field)}
        if cls.__doc__ is not None and fields:  # without docstrings under python -OO
            options = (f"    {name}: {spec_of(field).help}" for name, field in fields.items())
            cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__), "", "Options:", *options])

    def __post_init__(self) -> None:
        path = _PATH.get()
        for field in dataclasses.fields(cast(Any, self)):
            value = getattr(self, field.name)
            _check_type(path + field.name, field.default, value)
            spec_of(field).check(path + field.name, value)
        self.check(path)

    def check(self, path: str) -> None:
        """Check options against each other, for subclasses.

        Args:
            path: what to write before the name of an option: empty, or groups as in `actor.optim.`.

        Raises:
            ConfigError: they do not fit; names the key to set.
        """


_TYPES: Mapping[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (numbers.Integral, "an integer"),
    float: (numbers.Real, "a number"),
    str: (str, "text"),
    tuple: (tuple, "a tuple"),
}
"""Type of an option's default -> the type of its values, in words too."""


def _check_type(key: str, default: object, value: object) -> None:
    """Check that a value has the type of the option's default; groups and required options have
    none.
    """
    if type(default) not in _TYPES:
        return
    kind, words = _TYPES[type(default)]
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    require(fits, key, words, value)


def build(kind: type[T], values: Mapping[str, Any], path: str = "") -> T:
    """Build a dataclass and its nested groups.

    Args:
        kind: a dataclass; groups among its fields are dataclasses too, lists are tuples.
        values: name -> value, or mapping of values for a group.
        path: where the group is, such as `actor.optim.`, for messages.

    Raises:
        ConfigError: a value is wrong; names its key.
    """
    hints = typing.get_type_hints(kind)
    arguments = {name: _built(hints[name], value, path + name) for name, value in values.items()}
    token = _PATH.set(path)
    try:
        return kind(**arguments)
    finally:
        _PATH.reset(token)


def _built(hint: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return build(cast(type[Any], hint), value, f"{key}.")
    if typing.get_origin(hint) is not tuple:
        return value
    element = typing.get_args(hint)[0]
    try:
        return tuple(_element(element, item) for item in items(value))
    except ValueError as error:
        raise ConfigError(f"{key} must be a list of {element.__name__}; got {value!r}.") from error


def _element(kind: Callable[[Any], T], item: object) -> T:
    """An element of a list, as text or as a number that loses nothing.

    Raises:
        ValueError: it is neither.
    """
    if not isinstance(item, str | int | float) or isinstance(item, bool):
        raise ValueError(item)
    element = kind(item)
    if isinstance(item, float) and kind is int and element != item:
        raise ValueError(item)
    return element


def items(value: object) -> list[Any]:
    """The items of a list, or of comma-separated text; None has none, another value is one.

    >>> items("a, b"), items(["a"]), items(""), items(2)
    (['a', 'b'], ['a'], [], [2])
    """
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if value is None:
        return []
    return list(cast(Iterable[Any], value)) if isinstance(value, list | tuple) else [value]


def require(ok: bool, key: str, rule: str, got: object) -> None:
    """Raise ConfigError for `key` unless `ok`; `rule` completes "<key> must be ..."."""
    if not ok:
        raise ConfigError(f"{key} must be {rule}; got {got!r}.")


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence with the most similar known name; empty if none is similar."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    close = close or sorted((other for other in names if other and name.startswith(other)), key=len)[-1:]
    return f" Did you mean {close[0]!r}?" if close else ""
