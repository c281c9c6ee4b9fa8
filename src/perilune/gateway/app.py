"""The RSGI application: routes, the error boundary, shutdown."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple
from urllib.parse import unquote

from perilune.core.errors import EngineError
from perilune.gateway.body import read_body
from perilune.gateway.disconnect import ClientGoneError, while_connected
from perilune.gateway.endpoints import CHAT, COMPLETION, C, Endpoint, ModelCaller
from perilune.gateway.errors import (
    MethodNotAllowedError,
    ShuttingDownError,
    UnhealthyError,
    UnknownRouteError,
    error_reply,
    log_fault,
)
from perilune.gateway.reply import Reply, json_reply
from perilune.gateway.router import Router
from perilune.gateway.rsgi import HeaderList, HttpProtocol, HttpScope
from perilune.telemetry.metrics import CONTENT_TYPE, ServerMetrics

MAX_BODY_BYTES = 4 * 2**20
PING_INTERVAL_S = 15.0
"""Load balancers cut a connection that has been silent for 60 s."""

CLIENT_GONE = 499
"""Never sent: the status under which /metrics counts clients that left early."""

_MODEL_PREFIX = "/v1/models/"


class Request(NamedTuple):
    id: str
    scope: HttpScope
    proto: HttpProtocol
    reply_headers: HeaderList


class Handler(NamedTuple):
    method: str
    """GET stands for HEAD too: the server below leaves the body out."""
    answer: Callable[[Request], Coroutine[Any, Any, Reply | None]]
    """None means that the answer has gone out already, as a stream."""


class Gateway:
    """Serves the models of `router` over the OpenAI HTTP interface."""

    def __init__(
        self,
        router: Router,
        metrics: ServerMetrics,
        *,
        ping_interval_s: float = PING_INTERVAL_S,
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._caller = ModelCaller(router, metrics, ping_interval_s=ping_interval_s)
        self._routes = {
            "/v1/chat/completions": Handler("POST", lambda r: self._call_model(CHAT, r)),
            "/v1/completions": Handler("POST", lambda r: self._call_model(COMPLETION, r)),
            "/v1/models": Handler("GET", self._models),
            "/health": Handler("GET", self._health),
            "/metrics": Handler("GET", self._exposition),
        }
        self._model_route = Handler("GET", self._model)
        self._closing = False
        self._num_open = 0
        self._idle = asyncio.Event()

    async def __rsgi__(self, scope: HttpScope, proto: HttpProtocol) -> None:
        """Answers one request. Whatever happens, the client gets a result or an error to read."""
        request_id = secrets.token_hex(12)
        request = Request(request_id, scope, proto, [("x-request-id", request_id)])
        self._count_open(+1)
        try:
            status = await self._answer(request)
        finally:
            self._count_open(-1)
        route = scope.path if scope.path in self._routes else "other"
        self._metrics.http_requests.labels(route, str(status)).inc()

    async def drain(self, grace_s: float) -> None:
        """Takes no new requests, and waits up to `grace_s` for those under way."""
        self._closing = True
        if self._num_open:
            self._idle.clear()
            await asyncio.wait([asyncio.ensure_future(self._idle.wait())], timeout=grace_s)

    async def _answer(self, request: Request) -> int:
        """Sends the answer, an error included; returns its status."""
        try:
            handler = self._find(request.scope)
            reply = await while_connected(request.proto, handler.answer(request))
        except ClientGoneError:
            return CLIENT_GONE
        except Exception as error:  # the boundary: an answer for the client, a line in the log
            self._log_fault(error, request.id)
            reply = error_reply(error)
        if reply is None:
            return 200
        reply.send(request.proto, request.reply_headers)
        return reply.status

    def _log_fault(self, error: Exception, request_id: str) -> None:
        # At the end of the grace the engine breaks off what still runs: no fault of anyone.
        if not (self._closing and isinstance(error, EngineError)):
            log_fault(error, request_id)

    def _find(self, scope: HttpScope) -> Handler:
        is_model = scope.path.startswith(_MODEL_PREFIX)
        handler = self._model_route if is_model else self._routes.get(scope.path)
        if handler is None:
            known = ", ".join(self._routes)
            raise UnknownRouteError(f"no such path: {scope.path[:200]}; there is: {known}")
        allowed = ("GET", "HEAD") if handler.method == "GET" else (handler.method,)
        if scope.method not in allowed:
            raise MethodNotAllowedError(
                f"{scope.path[:200]} answers {handler.method}, not {scope.method[:20]}",
                allowed=", ".join(allowed),
            )
        return handler

    async def _call_model(self, endpoint: Endpoint[C], request: Request) -> Reply | None:
        if self._closing:
            raise ShuttingDownError("the server is shutting down")
        body = await read_body(request.scope, request.proto, MAX_BODY_BYTES)
        return await self._caller.answer(
            endpoint,
            body,
            request.proto,
            request.id,
            request.reply_headers,
            on_fault=lambda error: self._log_fault(error, request.id),
        )

    async def _models(self, request: Request) -> Reply:
        return json_reply({"object": "list", "data": self._router.cards()})

    async def _model(self, request: Request) -> Reply:
        model_id = unquote(request.scope.path.removeprefix(_MODEL_PREFIX))
        return json_reply(self._router.resolve(model_id).card())

    async def _health(self, request: Request) -> Reply:
        if self._closing:
            raise ShuttingDownError("the server is shutting down")
        failure = self._router.failure()
        if failure is not None:
            raise UnhealthyError(failure)
        return json_reply({"status": "ok"})

    async def _exposition(self, request: Request) -> Reply:
        return Reply(200, [("content-type", CONTENT_TYPE)], self._metrics.exposition())

    def _count_open(self, change: int) -> None:
        self._num_open += change
        self._metrics.http_requests_open.set(self._num_open)
        if self._num_open == 0:
            self._idle.set()
