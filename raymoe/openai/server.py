"""The HTTP server of OpenAI's files and batches, as an ASGI application of Starlette."""

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raymoe.data.rows import shown
from raymoe.openai.batch import CHAT, COMPLETION
from raymoe.openai.connections import WELCOME
from raymoe.openai.direct import as_answer, as_row
from raymoe.openai.jobs import BatchWorker
from raymoe.openai.metrics import CONTENT_TYPE, exposition
from raymoe.openai.store import INPUT, ApiError, Store, page
from raymoe.safe_text import nesting_problem
from raymoe.specs.files import kind_problem
from raymoe.units import MIB, format_bytes

HEALTH = "/health"
MAX_HEADER_BYTES = 16 << 10
MAX_JSON_BYTES, MAX_PROMPT_BYTES = 1 * MIB, 16 * MIB
SMALL_BYTES = 64 << 10  # of JSON that is read at once
MAX_PARSERS = 2  # large bodies that are read at the same time: objects take many times the memory
MAX_FORM_FIELDS, MAX_FIELD_BYTES = 8, 4096
FORM_BYTES = 64 << 10  # of a multipart body, besides the file
DRAIN_BYTES, DRAIN_S = 64 * MIB, 1.0
MAX_METADATA, MAX_KEY_CHARACTERS, MAX_VALUE_CHARACTERS = 16, 64, 512
WINDOW = re.compile(r"[1-9][0-9]{0,3}[hd]", re.ASCII)
BATCH_FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata")


class Server:
    """The handlers; `application` is what uvicorn runs.

    Args:
        models: Names of the model, as requests give them.
        token: What requests must carry; without one, only requests for this machine that no web
            page sent are answered.
        max_file_bytes: Of an upload.
        max_request_bytes: Of the body of another request.
    """

    def __init__(
        self,
        store: Store,
        worker: BatchWorker,
        models: Sequence[str],
        *,
        token: str | None,
        max_file_bytes: int,
        max_request_bytes: int = MAX_PROMPT_BYTES,
    ) -> None:
        self._max_request_bytes = max_request_bytes
        self._store, self._worker, self._models = store, worker, tuple(models)
        self._max_file_bytes = max_file_bytes
        self._started = int(time.time())
        self._token = token

    def application(self) -> Starlette:
        """Return the application; its lifespan is that of the worker."""
        routes: tuple[tuple[str, str, Callable[..., Any]], ...] = (
            ("GET", HEALTH, self._show_health),
            ("GET", "/metrics", self._show_metrics),
            ("GET", "/v1/models", self._list_models),
            ("GET", "/v1/models/{model:path}", self._show_model),
            ("POST", "/v1/files", self._upload),
            ("GET", "/v1/files", self._list_files),
            ("GET", "/v1/files/{file_id}", self._show_file),
            ("DELETE", "/v1/files/{file_id}", self._delete_file),
            ("GET", "/v1/files/{file_id}/content", self._download),
            ("POST", "/v1/batches", self._create_batch),
            ("POST", CHAT, self._complete),
            ("POST", COMPLETION, self._complete),
            ("GET", "/v1/batches", self._list_batches),
            ("GET", "/v1/batches/{batch_id}", self._show_batch),
            ("POST", "/v1/batches/{batch_id}/cancel", self._cancel_batch),
        )
        app = Starlette(
            routes=[Route(path, handle, methods=[method]) for method, path, handle in routes],
            middleware=[Middleware(Guard, token=self._token)],
            exception_handlers={
                ApiError: _answer_api_error,
                HTTPException: _answer_http_error,
                OSError: _answer_os_error,
                Exception: _answer_exception,
            },
            lifespan=self._lifespan,
        )
        app.router.redirect_slashes = False
        return app

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._worker.start()
        yield
        await run_in_threadpool(self._worker.stop)

    async def _show_health(self, _: Request) -> Response:
        problem = self._worker.problem
        if problem:
            return answer({"status": "failed", "reason": problem}, 503)
        return answer({"status": "ok"})

    def _show_metrics(self, _: Request) -> Response:
        page = exposition(self._store.batches(), self._worker.actors())
        return Response(page.encode(errors="replace"), media_type=CONTENT_TYPE)

    def _list_models(self, _: Request) -> Response:
        return answer({"object": "list", "data": [*map(self._model, self._models)]})

    def _show_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._models:
            raise ApiError(404, f"no model has the name {name:.80}", code="model_not_found")
        return answer(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "raymoe"}

    async def _upload(self, request: Request) -> Response:
        limit_body(request, self._max_file_bytes + FORM_BYTES)
        async with request.form(
            max_files=1, max_fields=MAX_FORM_FIELDS, max_part_size=MAX_FIELD_BYTES
        ) as form:
            file = _check_form(form)
            if not file.size:
                raise ApiError(400, "the file is empty", param="file")
            if file.size > self._max_file_bytes:
                raise _too_large(self._max_file_bytes)
            name = file.filename or "upload"
            record = await run_in_threadpool(self._store.add_file, file.file, name)
        return answer(record.as_plain())

    def _list_files(self, request: Request) -> Response:
        query = _read_query(request, ("limit", "after", "order", "purpose"))
        files = self._store.files(query.get("purpose"))
        if query.get("order", "desc") not in ("asc", "desc"):
            raise ApiError(400, "order takes asc or desc", param="order")
        if query.get("order") != "asc":
            files.reverse()
        return answer(page(files, query, default=10_000, maximum=10_000))

    def _show_file(self, request: Request) -> Response:
        return answer(self._store.file(request.path_params["file_id"]).as_plain())

    def _delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        self._store.delete_file(file_id)
        return answer({"id": file_id, "object": "file", "deleted": True})

    def _download(self, request: Request) -> Response:
        path = self._store.content(request.path_params["file_id"])
        problem = kind_problem(path) if path.exists() else "is gone"
        if problem:
            raise ApiError(500, f"the content of {path.stem} {problem}")
        return FileResponse(path, media_type="application/jsonl")

    async def _create_batch(self, request: Request) -> Response:
        body = await read_json(request, MAX_JSON_BYTES)
        for name in body:
            if name not in BATCH_FIELDS:
                raise ApiError(400, f"{shown(name)} is not supported here", param=name[:80])
        endpoint, window = body.get("endpoint"), body.get("completion_window")
        if endpoint not in (CHAT, COMPLETION):
            raise ApiError(400, f"endpoint is {shown(endpoint)}; it takes {CHAT!r} or "
                           f"{COMPLETION!r}", param="endpoint")  # fmt: skip
        if not isinstance(window, str) or not WINDOW.fullmatch(window):
            raise ApiError(400, f"completion_window is {shown(window)}; it takes a text such as "
                           "'24h'", param="completion_window")  # fmt: skip
        file_id = body.get("input_file_id")
        if not isinstance(file_id, str):
            raise ApiError(400, f"input_file_id is {shown(file_id)}; it takes the id of a file",
                           param="input_file_id")  # fmt: skip
        if self._store.file(file_id, "input_file_id").purpose != INPUT:
            raise ApiError(
                400, f"{file_id} was not uploaded with purpose {INPUT!r}", param="input_file_id"
            )
        batch = await run_in_threadpool(
            self._store.add_batch, endpoint=endpoint, input_file_id=file_id,
            completion_window=window, metadata=_read_metadata(body.get("metadata")),
        )  # fmt: skip
        return answer(batch.as_plain())

    async def _complete(self, request: Request) -> Response:
        body = await read_json(request, self._max_request_bytes)
        if body.get("model") not in self._models:
            raise ApiError(404, f"model is {shown(body.get('model'))}; this server has "
                           f"{', '.join(self._models)}", code="model_not_found")  # fmt: skip
        url = request.url.path
        row = await run_in_threadpool(as_row, url, body)
        answered = await asyncio.wrap_future(self._worker.answer(row))
        return answer(*as_answer(answered, url))

    def _list_batches(self, request: Request) -> Response:
        query = _read_query(request, ("limit", "after"))
        return answer(page(self._store.batches()[::-1], query, default=20, maximum=100))

    def _show_batch(self, request: Request) -> Response:
        return answer(self._store.batch(request.path_params["batch_id"]).as_plain())

    def _cancel_batch(self, request: Request) -> Response:
        return answer(self._worker.cancel(request.path_params["batch_id"]).as_plain())


def answer(content: Mapping[str, Any], status: int = 200) -> Response:
    # ASCII: names of files and other text of clients may have lone surrogates.
    return Response(json.dumps(content), status, media_type="application/json")


class Guard:
    """Refuses requests without the token, before anything of their body is read.

    Probes of a cluster have no token: without one, the health is told and nothing else.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            receive, send = _read_before_refusal(headers, receive, send)
            stranger = self._problem(headers)
            problem = _size_problem(scope) or _framing_problem(headers)
            if self._expected is None or scope["path"] != HEALTH:
                problem = problem or stranger
            if problem is not None:
                refusal = answer(problem.as_plain(), problem.status)
                if problem.status == 400:
                    refusal.headers["connection"] = "close"
                await refusal(scope, receive, send)
                return
            if stranger is None:
                scope.get(WELCOME, lambda: None)()
        await self._app(scope, receive, send)

    def _problem(self, headers: Headers) -> ApiError | None:
        if self._expected is not None:
            given = headers.get("authorization", "").encode("latin-1")
            if hmac.compare_digest(given, self._expected):
                return None
            return ApiError(401, "the request needs the server's token: Authorization: Bearer ...",
                            code="invalid_api_key")  # fmt: skip
        if _is_of_a_page(headers) or not is_loopback(_host_name(headers.get("host", ""))):
            return ApiError(403, "without a token, the server answers programs of this machine "
                            "only, at 127.0.0.1 or localhost")  # fmt: skip
        return None


def _is_of_a_page(headers: Headers) -> bool:
    """Whether a web page sent a request: it may send some to this machine, and a browser says so.

    Sec-Fetch-Site is "none" for what a user typed. Pictures and links come without an Origin.
    """
    site, referer = headers.get("sec-fetch-site", "none"), headers.get("referer", "")
    return "origin" in headers or site != "none" or bool(referer)


def _size_problem(scope: Scope) -> ApiError | None:
    num_bytes = len(scope["raw_path"]) + len(scope["query_string"])
    num_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
    if num_bytes <= MAX_HEADER_BYTES:
        return None
    return ApiError(431, f"path and headers have more than {format_bytes(MAX_HEADER_BYTES)}")


def _framing_problem(headers: Headers) -> ApiError | None:
    # A proxy that believes the length sees other requests in the bytes than one that counts chunks.
    if "content-length" in headers and "transfer-encoding" in headers:
        return ApiError(400, "the request has both Content-Length and Transfer-Encoding")
    return None


def _read_before_refusal(headers: Headers, receive: Receive, send: Send) -> tuple[Receive, Send]:
    """Read what is left of a body, within limits, before an error is sent.

    A connection that is closed with data unread is reset, and the client never sees the error.
    """
    is_read, num_bytes = "expect" in headers, 0

    async def counted() -> Message:
        nonlocal is_read, num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        is_read = not message.get("more_body", False)
        return message

    async def drain() -> None:
        with contextlib.suppress(TimeoutError):
            while not is_read and num_bytes < DRAIN_BYTES:
                await asyncio.wait_for(counted(), DRAIN_S)

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            await drain()
        await send(message)

    return counted, sending


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _host_name(header: str) -> str:
    match = re.fullmatch(r"\[([0-9a-fA-F:.]+)\](:[0-9]+)?|([^:]*)(:[0-9]+)?", header, re.ASCII)
    return "" if match is None else match[1] or match[3] or ""


def limit_body(request: Request, max_bytes: int) -> None:
    """Have reading the body fail as soon as it is too long.

    Raises:
        ApiError: Its header already says that it is, or that it is compressed.
    """
    if request.headers.get("content-encoding", "identity") != "identity":
        raise ApiError(415, "Content-Encoding is not supported; send the body as it is")
    length = request.headers.get("content-length", "0")
    if not re.fullmatch(r"[0-9]{1,18}", length, re.ASCII):
        raise ApiError(400, "Content-Length is no number")
    if int(length) > max_bytes:
        raise _too_large(max_bytes)
    receive, num_bytes = request.receive, 0

    async def counted() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        return message

    request._receive = counted  # noqa: SLF001 - Starlette has no public way to wrap it


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body has more than {format_bytes(max_bytes)}")


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the object that a body holds.

    Raises:
        ApiError: It is too long, or no JSON object.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type is {kind[:80]!r}; it takes application/json")
    limit_body(request, max_bytes)
    data = await request.body()
    if len(data) <= SMALL_BYTES:
        return _parse_json(data)
    return await to_thread.run_sync(_parse_json, data, limiter=_parsers())


@functools.cache
def _parsers() -> CapacityLimiter:
    return CapacityLimiter(MAX_PARSERS)


def _parse_json(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}"[:300]) from error
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is {shown(body)}; it takes an object")
    problem = nesting_problem(body)
    if problem:
        raise ApiError(400, f"the body {problem}")
    return body


def _check_form(form: FormData) -> UploadFile:
    names = [name for name, _ in form.multi_items()]
    for name in names:
        if name not in ("file", "purpose") or names.count(name) > 1:
            raise ApiError(400, f"the form field {shown(name)} is not supported here, or occurs "
                           "twice", param=name[:80])  # fmt: skip
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "the form has no file; it takes multipart/form-data with the fields "
                       "file and purpose", param="file")  # fmt: skip
    if purpose != INPUT:
        raise ApiError(400, f"purpose is {shown(purpose)}; it takes {INPUT!r}", param="purpose")
    return file


def _read_query(request: Request, names: Collection[str]) -> dict[str, str]:
    query = dict(request.query_params)
    for name in query:
        if name not in names:
            raise ApiError(400, f"{shown(name)} is no parameter; there are {', '.join(names)}")
    return query


def _read_metadata(value: Any) -> tuple[tuple[str, str], ...] | None:
    if value is None:
        return None
    is_right = (
        isinstance(value, dict)
        and len(value) <= MAX_METADATA
        and all(len(key) <= MAX_KEY_CHARACTERS for key in value)
        and all(isinstance(v, str) and len(v) <= MAX_VALUE_CHARACTERS for v in value.values())
    )
    if not is_right:
        raise ApiError(
            400, f"metadata is {shown(value)}; it takes an object of at most {MAX_METADATA} texts "
            f"of {MAX_VALUE_CHARACTERS} characters, with names of {MAX_KEY_CHARACTERS}",
            param="metadata",
        )  # fmt: skip
    return tuple(value.items())


async def _answer_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return answer(error.as_plain(), error.status)


async def _answer_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return answer(ApiError(error.status_code, str(error.detail)).as_plain(), error.status_code)


async def _answer_os_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    problem = ApiError(507, f"the server's directory cannot be written: {error.strerror}")
    return answer(problem.as_plain(), problem.status)


async def _answer_exception(_: Request, error: Exception) -> Response:
    problem = ApiError(500, f"the server failed with {type(error).__name__}; its log says more")
    return answer(problem.as_plain(), problem.status)
