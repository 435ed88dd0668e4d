"""An HTTP endpoint on loopback in front of a policy. The only module that imports aiohttp.

POST {base_url}/completions, {base_url}/chat/completions        GET {base_url}/models

base_url is http://127.0.0.1:PORT/sessions/ID/v1. An OpenAI client needs this URL and the key. A
client whose path is fixed uses http://127.0.0.1:PORT/v1 with the header `X-Session-Id: ID`.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Self

import msgspec
from aiohttp import web

from rl_protocol import ConfigError, KeptSets, RLError, RolloutError, SchemaError
from rl_protocol.batch.routed_experts import join_routed
from rl_protocol.errors import UNREADABLE
from rl_protocol.ports import SamplingParams
from rl_protocol.support.shared_secret import MIN_CHARACTERS, SecretSource
from rl_trainer.asyncio_tasks import gather_or_cancel
from rl_trainer.rollout.partial_generation import generate_turn
from rl_trainer.rollout.serving.openai_api import (
    ChatRequest,
    Choice,
    CompletionRequest,
    chat_body,
    completion_body,
    told_text,
)
from rl_trainer.rollout.serving.policy import Policy
from rl_trainer.rollout.serving.recorder import Completion, Recorder, common_end
from rl_trainer.rollout.serving.tokenizer import ChatTokenizer
from rl_trainer.rollout.stop_strings import text_until_stop, tokens_until_stop

ENDPOINT_KEY = SecretSource(
    "RL_ENDPOINT_KEY", "RL_ENDPOINT_KEY_FILE", "the rollout endpoint", "the endpoint and its agents"
)
"""Where an endpoint that is started by hand finds its key."""
MAX_CHOICES = 128
_MAX_BODY = 32 << 20
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """Settings of an endpoint.

    Attributes:
        model: the model name that requests must give.
        context: most tokens of prompt and response together.
        sampling: how responses are sampled. Log-probs are recorded for training, so a request can't
            choose another temperature, top_p or top_k. `max_new_tokens` is the default and the
            limit of a request; its own `stop` is added to `stop`; the rest applies as it is.
        key: bearer token of the agents, at least 32 characters.
        port: 0: any free port.
        request_timeout_s: longest time of a request, admission included.

    Raises:
        ConfigError: the key is too short, or a number is out of range.
    """

    model: str
    context: int
    sampling: SamplingParams
    key: bytes
    port: int = 0
    request_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if len(self.key) < MIN_CHARACTERS:
            raise ConfigError(f"An endpoint needs a key: {ENDPOINT_KEY.how_to_set}.")
        if not self.model or self.context < 2 or self.request_timeout_s <= 0:
            raise ConfigError(
                "An endpoint needs the name of a model, a context of at least 2 tokens and request_timeout_s greater than 0; "
                f"got {self.model!r}, {self.context}, {self.request_timeout_s}."
            )


@dataclass(frozen=True, slots=True)
class ServedSession:
    """A session that agents can use.

    Attributes:
        base_url: the URL for an OpenAI client.
        recorder: its requests and answers.
    """

    base_url: str
    recorder: Recorder
    policy: Policy


class _Refused(Exception):
    """A request that is answered with an error. Never leaves this module."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Endpoint:
    """Serves sessions on one event loop.

    Lifecycle: enter it with `async with`, then open and close sessions.

        policy = over_engine(engine, sampling, "p7")
        async with Endpoint(config, tokenizer) as endpoint:
            async with endpoint.session(prompt_ids, policy) as session:
                ...                                     # an agent talks to session.base_url
                rows = session.recorder.trajectories()

    A client that disconnects aborts its request. A generation that an update of the weights aborts
    is continued with the new weights, and every token is recorded with the version that generated
    it.

    Args:
        config: see EndpointConfig.
        tokenizer: for agents that send text; None: requests must be token ids.

    Raises:
        ConfigError: `config.sampling.stop` is given, and there is no tokenizer.
    """

    def __init__(self, config: EndpointConfig, tokenizer: ChatTokenizer | None = None) -> None:
        if config.sampling.stop and tokenizer is None:
            raise ConfigError("An endpoint whose EndpointConfig.sampling has stop strings needs a tokenizer.")
        self._config = config
        self._codec = tokenizer
        self._sessions: dict[str, ServedSession] = {}
        self._numbers = itertools.count(1)
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._guarded])
        for prefix in ("/sessions/{session}/v1", "/v1"):
            app.router.add_get(f"{prefix}/models", self._models)
            app.router.add_post(f"{prefix}/completions", self._completions)
            app.router.add_post(f"{prefix}/chat/completions", self._chat)
        # a handler is cancelled when its client hangs up, and with it the request in the engine
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        self._port = 0

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, _HOST, self._config.port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"The endpoint can't listen on {_HOST}:{self._config.port}: {error}.") from error
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @asynccontextmanager
    async def session(self, prompt_ids: Sequence[int], policy: Policy) -> AsyncGenerator[ServedSession]:
        """Open a session whose contexts all begin with these tokens."""
        name = secrets.token_hex(8)
        served = ServedSession(f"http://{_HOST}:{self._port}/sessions/{name}/v1", Recorder(prompt_ids), policy)
        self._sessions[name] = served
        try:
            yield served
        finally:
            del self._sessions[name]

    # -- requests
    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check the key, and answer every failure in OpenAI's format."""
        try:
            shown = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(shown, b"Bearer " + self._config.key):
                raise _Refused(401, "invalid_api_key", "The key is missing or wrong: send `Authorization: Bearer KEY`.")
            async with asyncio.timeout(self._config.request_timeout_s):
                return await handler(request)
        except _Refused as error:
            return _error(error.status, error.code, str(error))
        except web.HTTPException as error:
            return _error(error.status, "invalid_request_error", f"{request.method} {request.path}: {error.reason}.")
        except (ConfigError, SchemaError) as error:
            return _error(400, "invalid_request_error", str(error))
        except RLError as error:
            return _error(503, "engine_unavailable", str(error))
        except TimeoutError:
            return _error(504, "timeout", f"No answer within {self._config.request_timeout_s:g} s (request_timeout_s).")

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        return web.json_response(
            {
                "object": "list",
                "data": [{"id": self._config.model, "object": "model", "max_model_len": self._config.context}],
            }
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        session, asked = self._session(request), await _read(request, CompletionRequest)
        if asked.logprobs not in (None, 0, 1):
            raise _Refused(400, "invalid_request_error", f"logprobs must be 0 or 1; got {asked.logprobs}.")
        given = asked.prompt if isinstance(asked.prompt, str) else ""
        ids = asked.prompt_token_ids or (() if isinstance(asked.prompt, str) else asked.prompt)
        choices, prompt = await self._answer(session, asked, ids, given, asked.max_tokens, asked.logprobs is not None)
        return await _respond(request, asked, completion_body(asked, choices, prompt, self._name()))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session, asked = self._session(request), await _read(request, ChatRequest)
        if asked.top_logprobs:
            raise _Refused(400, "invalid_request_error", "top_logprobs must be 0: log-probs are of the tokens drawn.")
        ids = asked.prompt_token_ids or ()
        given = "" if ids or not asked.messages else self._words().prompt([turn.plain for turn in asked.messages])
        limit = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
        told = told_text([turn.plain for turn in asked.messages], given)
        choices, prompt = await self._answer(session, asked, ids, given, limit, asked.logprobs, told)
        return await _respond(request, asked, chat_body(asked, choices, prompt, self._name()))

    def _session(self, request: web.Request) -> ServedSession:
        name = request.match_info.get("session") or request.headers.get("X-Session-Id", "")
        if name not in self._sessions:
            raise _Refused(
                404, "session_not_found", f"There is no session {name!r}: use its base_url, or name it in X-Session-Id."
            )
        return self._sessions[name]

    def _words(self) -> ChatTokenizer:
        if self._codec is None:
            raise _Refused(
                400, "invalid_request_error", "This endpoint has no tokenizer: send prompt_token_ids, and no stop."
            )
        return self._codec

    def _name(self) -> str:
        return f"cmpl-{next(self._numbers)}"

    # -- generation
    async def _answer(
        self,
        session: ServedSession,
        asked: CompletionRequest | ChatRequest,
        ids: tuple[int, ...],
        text: str,
        limit: int | None,
        spell: bool,
        told: str = "",
    ) -> tuple[list[Choice], tuple[int, ...]]:
        """Generate and record the choices; returns them and the context they follow. `told` is the
        end of `text` that follows the policy's turns.
        """
        self._check_settings(asked)
        if not ids and text:
            ids = session.recorder.ids(text, self._words().encode, self._words().encode_rest)
        try:
            session.recorder.check(ids)
        except RolloutError as error:
            raise _Refused(400, "invalid_request_error", str(error)) from error
        if asked.stops:
            self._words()
        budget = self._budget(ids, limit)
        new = common_end(ids, self._words().encode_rest(told)) if told else 0
        answered = await gather_or_cancel(*(self._whole(session.policy, ids, budget, asked) for _ in range(asked.n)))
        choices: list[Choice] = []
        for completion, finish in answered:
            if session not in self._sessions.values():
                raise _Refused(409, "session_closed", "The session ended while this was generated.")
            said = text + self._codec.decode(completion.response_ids, special=True) if text and self._codec else ""
            session.recorder.add(replace(completion, told=new), said)
            choices.append(self._choice(completion, finish, asked, spell))
        return choices, ids

    async def _whole(
        self, policy: Policy, context: tuple[int, ...], budget: int, asked: CompletionRequest | ChatRequest
    ) -> tuple[Completion, str]:
        """Generate one completion, continuing it when an update of the weights aborts it."""
        stops = self._stops(asked)
        parts, finish = await generate_turn(
            lambda made, left: policy((*context, *made), left, asked.seed, asked.stops),
            budget,
            lambda made: tokens_until_stop(made, self._plain, stops),
        )
        ids = tuple(token for part in parts for token in part.response_ids)
        if not ids:
            raise RolloutError(
                f"The engine ended the response {len(parts)} times before its first token, the last time with the "
                f"finish reason {finish!r}; updates of the weights do so. Send the request again."
            )
        log_probs = tuple(value for part in parts for value in part.log_probs)
        versions = tuple(part.weight_version for part in parts for _ in part.response_ids)
        sets = KeptSets.joined((len(part.response_ids), part.kept) for part in parts)
        whole = Completion(
            context=context,
            response_ids=ids,
            log_probs=log_probs,
            versions=versions,
            kept=sets,
            routed=join_routed(part.routed for part in parts),
            finish=finish,
        )
        return whole, finish

    def _stops(self, asked: CompletionRequest | ChatRequest) -> tuple[str, ...]:
        """Strings that end the choices of a request."""
        return (*self._config.sampling.stop, *asked.stops)

    def _plain(self, ids: Sequence[int]) -> str:
        return self._words().decode(ids, special=False)

    def _choice(
        self, completion: Completion, finish: str, asked: CompletionRequest | ChatRequest, spell: bool
    ) -> Choice:
        ids, words = completion.response_ids, self._codec
        text, stop = text_until_stop(
            words.decode(ids, special=False) if words else "",
            self._stops(asked),
            include=asked.include_stop_str_in_output,
        )
        return Choice(
            text=text,
            finish_reason="stop" if finish == "stop" else "length",
            stop_reason=stop,
            token_ids=ids,
            tokens=tuple(words.decode([token], special=True) if words else f"token_id:{token}" for token in ids)
            if spell
            else (),
            log_probs=completion.log_probs,
            versions=completion.versions,
        )

    def _check_settings(self, asked: CompletionRequest | ChatRequest) -> None:
        if asked.model != self._config.model:
            raise _Refused(
                404, "model_not_found", f"There is no model {asked.model!r}; this endpoint has {self._config.model!r}."
            )
        if not 1 <= asked.n <= MAX_CHOICES:
            raise _Refused(400, "invalid_request_error", f"n must be in 1..{MAX_CHOICES}; got {asked.n}.")
        if "" in asked.stops:
            raise _Refused(400, "invalid_request_error", f"stop must have no empty strings; got {asked.stop!r}.")
        ours = self._config.sampling
        for name in ("temperature", "top_p", "top_k"):
            wanted = getattr(asked, name)
            if wanted not in (None, getattr(ours, name)):
                raise _Refused(
                    400,
                    "invalid_request_error",
                    f"{name} is {getattr(ours, name)} here, for what is made is trained on; leave it out. Got {wanted}.",
                )

    def _budget(self, ids: tuple[int, ...], limit: int | None) -> int:
        """Most tokens of the response."""
        if not ids:
            raise _Refused(400, "invalid_request_error", "There is no prompt, or it has no tokens.")
        room, most = self._config.context - len(ids), self._config.sampling.max_new_tokens
        budget = min(room, most) if limit is None else limit
        if min(room, budget) < 1 or budget > room:
            raise _Refused(
                400,
                "context_length_exceeded",
                f"The prompt has {len(ids)} tokens and max_tokens is {budget if limit is not None else 'at least 1'}; the model's context is "
                f"{self._config.context} tokens, and max_tokens must be at least 1.",
            )
        return min(budget, most)


async def _read(request: web.Request, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except UNREADABLE as error:
        raise _Refused(
            400, "invalid_request_error", f"The body is not a request that is served here: {error}."
        ) from error


async def _respond(
    request: web.Request, asked: CompletionRequest | ChatRequest, body: Mapping[str, Any]
) -> web.StreamResponse:
    """A JSON body, or a stream of one piece."""
    if not asked.stream:
        return web.json_response(body)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for data in (json.dumps(body), "[DONE]"):
        await response.write(f"data: {data}\n\n".encode())
    await response.write_eof()
    return response


def _error(status: int, code: str, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({"error": {"message": message, "type": kind, "param": None, "code": code}}, status=status)
