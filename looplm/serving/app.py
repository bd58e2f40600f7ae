"""The application: its routes, and how what goes wrong in them is said."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from looplm.errors import UserError
from looplm.inference.engine import Engine
from looplm.inference.exit_policy import QuantileExit
from looplm.serving.depth import check_loops
from looplm.serving.errors import ApiError, Json, as_api_error
from looplm.serving.json_body import JsonRoute
from looplm.serving.limits import Guard, Limits
from looplm.serving.loops import loop_views
from looplm.serving.metrics import Metrics
from looplm.serving.prompts import PromptReader
from looplm.serving.schema import ChatRequest, CompletionRequest, Generation, LoopsRequest, first_problem
from looplm.serving.streams import ClientGone, while_connected
from looplm.serving.texts import Aside, Texts
from looplm.serving.worker import Busy, EngineFailed, EngineWorker

BODIES = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest, "/v1/loops": LoopsRequest}
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page has its script and style inside, and nothing may come from elsewhere."""


def create_app(
    engine: Engine, *, model_name: str, limits: Limits, max_waiting: int = 128, cors_origins: tuple[str, ...] = ()
) -> FastAPI:
    """The server as an ASGI application. It owns `engine` from now on; nobody else may use it."""
    server = Server(engine, model_name, limits, max_waiting)
    app = FastAPI(title="looplm", docs_url=None, redoc_url=None, openapi_url=None, lifespan=server.lifespan)
    app.state.server = server
    app.router.route_class = JsonRoute
    for path, told in (
        ("/", server.page),
        ("/health", server.health),
        ("/metrics", server.show_metrics),
        ("/v1/models", server.models),
        ("/v1/models/{name:path}", server.model),
    ):
        app.api_route(path, methods=["GET", "HEAD"])(told)
    app.post("/v1/completions")(server.completions)
    app.post("/v1/chat/completions")(server.chat)
    app.post("/v1/loops")(server.loops)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
    for failure in (ApiError, Busy, ClientGone, EngineFailed, TimeoutError, UserError, Exception):
        app.add_exception_handler(failure, _answered)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    app.add_middleware(Guard, limits=limits, metrics=server.metrics)
    return app


class Server:
    """The routes, and what they share."""

    def __init__(self, engine: Engine, model_name: str, limits: Limits, max_waiting: int) -> None:
        self.metrics = Metrics(engine)
        self.worker = EngineWorker(engine, max_waiting=max_waiting, on_finished=self.metrics.finished)
        self.name = model_name
        self._prompts = PromptReader(engine)
        self._aside = Aside()
        self._texts = Texts(
            self.worker,
            self._prompts,
            self._aside,
            self.metrics,
            model_name=model_name,
            request_seconds=limits.request_seconds,
        )
        self._lm, self._trained = engine.model, engine.model.model.config.num_loops
        self._seconds = limits.request_seconds
        self._card = {
            "id": model_name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "looplm",
            "num_loops": self._trained,
            "exit_threshold": engine.default_exit.threshold if isinstance(engine.default_exit, QuantileExit) else None,
            "max_model_len": engine.max_len,
            "kv_cache": engine.kv_cache,
            "chat": self._prompts.can_chat,
        }
        self._page = files("looplm.serving").joinpath("page.html").read_text("utf-8")

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Runs the engine's thread while the server is up."""
        self.worker.start()
        yield
        await self.worker.close()
        self._aside.close()

    async def page(self) -> Response:
        """The playground."""
        headers = {"content-security-policy": PAGE_POLICY, "x-content-type-options": "nosniff"}
        return Response(self._page, media_type="text/html", headers=headers)

    async def health(self) -> Json:
        """200 while requests can be served, 503 when not."""
        alive = self.worker.alive
        return Json({"status": "ok" if alive else "unavailable"}, 200 if alive else 503)

    async def show_metrics(self) -> Response:
        """Counts for Prometheus."""
        return Response(self.metrics.text(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})

    async def models(self) -> Json:
        """The one model there is."""
        return Json({"object": "list", "data": [self._card]})

    async def model(self, name: str) -> Json:
        """The model by its name."""
        self._check_model(name)
        return Json(self._card)

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """Continues prompts."""
        self._check_model(body.model)
        return await self._texts.complete(body, request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answers in a conversation."""
        self._check_model(body.model)
        return await self._texts.chat(body, request)

    async def loops(self, body: LoopsRequest, request: Request) -> Response:
        """What every loop says of a text."""
        self._check_model(body.model)
        check_loops(body.num_loops, self._trained)
        self._prompts.check_size(body.prompt)

        async def view() -> Any:
            async with asyncio.timeout(self._seconds):
                token_ids = await self._aside.read(self._prompts.token_ids, body.prompt)
                options = {"start": body.start, "top": body.top, "num_loops": body.num_loops}
                return await self._aside.view(
                    partial(loop_views, self._lm, self._prompts.tokenizer, token_ids, **options)
                )

        return Json(await while_connected(request, view()))

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(
                404,
                f"The model {name[:128]!r} does not exist; this server has {self.name!r}.",
                param="model",
                code="model_not_found",
            )


async def _invalid(request: Request, error: Exception) -> Response:
    """400 for a body that is not what the route takes."""
    assert isinstance(error, RequestValidationError)
    fields = BODIES.get(request.url.path, Generation).model_fields
    message, param = first_problem(list(fields), error.errors())
    return ApiError(400, message, param=param).response()


async def _refused(request: Request, error: Exception) -> Response:
    """404, 405, and a body that cannot be parsed at all."""
    assert isinstance(error, HTTPException)
    told = {
        400: "The body cannot be read as JSON.",
        404: f"There is nothing at {request.url.path[:128]}; see /v1/models, /v1/completions, /v1/chat/completions.",
        405: f"{request.method} is not possible here.",
    }
    message = told.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers).response()


async def _answered(request: Request, error: Exception) -> Response:
    """What went wrong while a request was served."""
    if isinstance(error, ClientGone):
        return Response(status_code=499)  # nobody reads it; the count of requests does
    return as_api_error(error).response()
