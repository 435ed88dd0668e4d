"""Rows of a data set: one row of a file in verl's format, and the prompt that it becomes.

    {"prompt": [{"role": "user", "content": "What is 2+3?"}], "data_source": "sums",
     "reward_model": {"ground_truth": "5"}, "extra_info": {"index": 0}}

The prompt may also be a text, which is then the only message, from the user. A row without
`reward_model` has its ground truth in a field of its own. `agent_name` chooses
how the row's sessions run (`check_agent`). A row may have `images`; its prompt then contains
`<image>` once for each (`rl_trainer.data.images`). Other columns are ignored, except `videos`,
which must be empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import msgspec

from rl_protocol import SchemaError
from rl_trainer.data.bad_rows import MissingFieldsError

DATA_SOURCE = "data"
"""The data source of rows that have none."""
_LISTED = 20
"""Largest number of fields of a row that a message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One prompt of a data set, as token ids."""

    prompt_ids: tuple[int, ...]
    """[P] token ids, P >= 1."""
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further facts for the reward function: anything that JSON can express."""
    images: tuple[str, ...] = ()
    """Paths of its images, in order; `prompt_ids` has one image token for every piece of them."""
    agent: str = ""
    """verl's name of the agent that runs its sessions; empty: that of the run."""


class PromptDataset(Protocol):
    """Prompts by row number."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> PromptRow: ...


class Message(msgspec.Struct, frozen=True):
    """One message of the conversation that is the prompt."""

    role: str
    content: str


class RewardModel(msgspec.Struct, frozen=True):
    """The field `reward_model`: what a response is compared with."""

    ground_truth: Any


class VerlRow(msgspec.Struct, frozen=True, kw_only=True):
    """A valid row of a data file."""

    prompt: tuple[Message, ...]
    reward_model: RewardModel
    data_source: str = DATA_SOURCE
    extra_info: dict[str, Any] | None = None
    agent_name: str | None = None
    images: Any = None
    videos: Any = None

    @property
    def ground_truth(self) -> str:
        """As text; JSON unless it is a string."""
        truth: object = self.reward_model.ground_truth
        return truth if isinstance(truth, str) else msgspec.json.encode(truth).decode()


def parse_row(raw: object, prompt_key: str = "prompt", ground_truth_key: str = "ground_truth") -> VerlRow:
    """Validate one row.

    Args:
        raw: the row.
        prompt_key: the field that holds the prompt.
        ground_truth_key: the field that holds the ground truth of a row without `reward_model`.

    Raises:
        SchemaError: the row is not valid. The message does not say which row it is.
    """
    if not isinstance(raw, Mapping):
        raise SchemaError(f"a row must be an object with named fields; got {type(raw).__name__}")
    fields = cast(Mapping[str, Any], raw)
    if fields.get("reward_model") is None and ground_truth_key in fields:
        fields = {**fields, "reward_model": {"ground_truth": fields[ground_truth_key]}}
    missing = tuple(name for name in (prompt_key, "reward_model") if name not in fields)
    if missing:
        raise _missing(missing, tuple(map(str, fields)), prompt_key, ground_truth_key)
    prompt = fields[prompt_key]
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    try:
        row = msgspec.convert({**fields, "prompt": prompt}, VerlRow)
    except msgspec.ValidationError as error:
        reason, found, place = str(error).partition("`$.prompt")
        named = f"`$.{prompt_key}{place} (DataFiles.prompt_key)" if found else ""
        raise SchemaError(f"{reason}{named}") from error
    if not any(message.content.strip() for message in row.prompt):
        raise SchemaError("the prompt is empty")
    calling = [i for i, message in enumerate(cast("Sequence[Mapping[str, Any]]", prompt)) if message.get("tool_calls")]
    if calling:
        raise SchemaError(
            f"message {calling[0] + 1} of the prompt has tool_calls, which are not supported yet; write them into its content as the model does"
        )
    if not row.data_source:
        raise SchemaError("data_source is empty")
    truth = row.reward_model.ground_truth
    if truth is None or (isinstance(truth, float) and not math.isfinite(truth)):
        found = "null" if truth is None else truth
        raise SchemaError(f"reward_model.ground_truth, or {ground_truth_key} without reward_model, is {found}")
    if row.videos:
        raise SchemaError("it has videos, which are not supported yet; leave such rows out")
    return row


def _missing(
    missing: tuple[str, ...], found: tuple[str, ...], prompt_key: str, ground_truth_key: str
) -> MissingFieldsError:
    told = {prompt_key: f"{prompt_key} (DataFiles.prompt_key)"}
    told["reward_model"] = f"reward_model or {ground_truth_key} (DataFiles.ground_truth_key)"
    named = ", ".join(told[name] for name in missing)
    listed = f"{', '.join(found[:_LISTED])}{', ...' if len(found) > _LISTED else ''}" or "none"
    return MissingFieldsError(f"missing fields: {named}; fields found: {listed}", missing=missing, found=found)


SINGLE_TURN_AGENT, TOOL_AGENT = "single_turn_agent", "tool_agent"
"""verl's names of agents."""


def check_agent(name: str, session: str) -> None:
    """Check that a run with RolloutConfig.session=`session` can run rows of this `agent_name`.

    `single_turn` and `tool_agent` run rows of single_turn_agent, `tool_agent` also those of
    tool_agent, and every session those of its own name.

    Raises:
        SchemaError: it can't.
    """
    known = {"single_turn": (SINGLE_TURN_AGENT,), TOOL_AGENT: (SINGLE_TURN_AGENT, TOOL_AGENT)}.get(session, (session,))
    if name and name not in known:
        remedy = f"; set RolloutConfig.session={name}" if name == TOOL_AGENT else ""
        raise SchemaError(
            f"agent_name must be {' or '.join(known)} with RolloutConfig.session={session}; got {name!r}{remedy}"
        )
