"""`raymoe serve`: OpenAI's files and batches over HTTP, each batch a run of `raymoe generate`."""

import functools
import importlib.util
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from raymoe.cli import size
from raymoe.cli.generate import check_batch_options
from raymoe.config import EngineConfig
from raymoe.data.generator import MoEGenerator
from raymoe.data.status import clear_status
from raymoe.errors import ConfigError
from raymoe.openai.batch import ID_COLUMN
from raymoe.openai.direct import REQUEST_ERROR_COLUMN, DirectRequests
from raymoe.specs.files import expanded, read_text
from raymoe.units import GIB, MIB

TOKEN_VARIABLE = "RAYMOE_SERVER_TOKEN"
MIN_TOKEN_CHARACTERS = 16
MODULES = ("starlette", "uvicorn", "python_multipart")
BACKLOG, GRACE_S = 1024, 5
DIRECT_STATUS = "direct.status"  # of the engine for requests that are no batch


Host = Annotated[
    str,
    typer.Option(help="Listen at this address; one that other machines can reach needs a token."),
]
Port = Annotated[
    int, typer.Option(min=0, max=65535, help="Listen at this port; 0 chooses a free one.")
]
ModelNames = Annotated[
    list[str] | None,
    typer.Option(
        help="Answer requests for a model of this name; by default the name is that of --model. "
        "Repeat the option for several."
    ),
]
FileSize = Annotated[
    int,
    typer.Option(
        parser=size,
        metavar="SIZE",
        help="Refuse uploaded files that are larger than this.",
        show_default="1GiB",
    ),
]
MaxRequests = Annotated[
    int, typer.Option(min=1, help="Refuse batches with more requests than this.")
]
Options = Annotated[
    list[str] | None,
    typer.Argument(
        help="Pass these options to raymoe generate, such as: -- --max-tokens 512.",
        metavar="[-- OPTIONS]",
    ),
]
RequestSize = Annotated[
    int,
    typer.Option(
        parser=size,
        metavar="SIZE",
        help="Refuse requests, other than uploads, whose body is larger than this.",
        show_default="16MiB",
    ),
]
Connections = Annotated[
    int, typer.Option(min=1, help="Refuse connections beyond this number with status 503.")
]
Strangers = Annotated[
    int,
    typer.Option(
        min=1,
        help="Keep at most this many connections that have not sent a request with the right "
        "token; one more closes the oldest.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        min=0.1,
        max=3600,
        help="Close a connection when its headers, the next 16 KiB of a body or the next part of a "
        "response take longer than this many seconds.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="Read the token that requests must send (Authorization: Bearer TOKEN, which is the "
        "api_key of OpenAI's client) from this file, instead of from the environment variable "
        f"{TOKEN_VARIABLE}."
    ),
]


def run(  # noqa: PLR0913 - the options of a command
    *,
    model: Annotated[
        str, typer.Option(help="Serve the model in this directory or of this name on the hub.")
    ],
    directory: Annotated[
        Path,
        typer.Option(
            help="Keep files and batches in this directory; a server that starts again continues "
            "with them."
        ),
    ],
    host: Host = "127.0.0.1",
    port: Port = 8000,
    token_file: TokenFile = None,
    served_model_name: ModelNames = None,
    max_file_size: FileSize = GIB,
    max_request_size: RequestSize = 16 * MIB,
    max_connections: Connections = 1024,
    max_strangers: Strangers = 128,
    timeout: Timeout = 30.0,
    max_requests: MaxRequests = 1_000_000,
    options: Options = None,
) -> None:
    """Serve OpenAI's batch API: POST /v1/files, POST /v1/batches, GET the output file.

    Batches run one after the other, each as a process of `raymoe generate`. A line on standard
    error says when a batch arrives, starts and ends.

    Health probes read /health, and Prometheus reads /metrics.
    """
    directory = expanded(directory)
    missing = [name for name in MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"raymoe serve needs {', '.join(missing)}: pip install 'raymoe[serve]'")
    token = _read_token(token_file)
    from raymoe.openai.server import is_loopback  # noqa: PLC0415 - only this command needs it

    if token is None and not is_loopback(host):
        raise ConfigError(f"--host {host} can be reached from other machines and needs a token: "
                          f"--token-file, or {TOKEN_VARIABLE} in the environment")  # fmt: skip
    arguments = ["--model", model, *(options or ())]
    generator_options, engine_config = check_batch_options(arguments)
    _serve(
        directory, _listen(host, port), served_model_name or [model], arguments, token=token,
        max_file_bytes=max_file_size, max_request_bytes=max_request_size,
        max_requests=max_requests,
        limits={"timeout_s": timeout, "max_connections": max_connections,
                "max_strangers": max_strangers},
        make_generator=functools.partial(
            _make_generator, model, generator_options, engine_config, directory / DIRECT_STATUS
        ),
    )  # fmt: skip


def _make_generator(
    model: str, options: Mapping[str, Any], config: EngineConfig, status_dir: Path
) -> MoEGenerator:
    clear_status(status_dir)  # of an engine that has ended
    return MoEGenerator(
        model, **options, engine_config=config, id_column=ID_COLUMN,
        error_column=REQUEST_ERROR_COLUMN,
        status_dir=status_dir,
    )  # fmt: skip


def _serve(  # noqa: PLR0913 - what `run` was given
    directory: Path,
    listening: socket.socket,
    models: Sequence[str],
    arguments: Sequence[str],
    *,
    token: str | None,
    max_file_bytes: int,
    max_request_bytes: int,
    max_requests: int,
    limits: Mapping[str, Any],
    make_generator: Callable[[], MoEGenerator],
) -> None:
    import uvicorn  # noqa: PLC0415

    from raymoe.openai.connections import ConnectionLimits, LimitedProtocol  # noqa: PLC0415
    from raymoe.openai.jobs import BatchWorker  # noqa: PLC0415
    from raymoe.openai.server import MAX_HEADER_BYTES, Server  # noqa: PLC0415
    from raymoe.openai.store import Store  # noqa: PLC0415

    store = Store(directory)
    try:
        command = [sys.executable, "-P", "-m", "raymoe", "generate", *arguments]
        direct = DirectRequests(make_generator)
        worker = BatchWorker(
            store, command, models, max_requests=max_requests, direct=direct,
            direct_status=directory / DIRECT_STATUS,
        )  # fmt: skip
        server = Server(
            store, worker, models, token=token, max_file_bytes=max_file_bytes,
            max_request_bytes=max_request_bytes,
        )  # fmt: skip
        protocol = functools.partial(LimitedProtocol, ConnectionLimits(**limits))
        config = uvicorn.Config(
            server.application(), http=cast("Any", protocol), ws="none", log_level="warning",
            access_log=False, server_header=False, h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_graceful_shutdown=GRACE_S,
        )  # fmt: skip
        host, port = listening.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        _show_log()
        typer.echo(f"listening at {url} for model {', '.join(models)}", err=True)
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        store.close()


def _show_log() -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("raymoe.openai").setLevel(logging.INFO)


def _read_token(path: Path | None) -> str | None:
    # Taken out of the environment, so that no process of a batch has it.
    token, where = os.environ.pop(TOKEN_VARIABLE, None), TOKEN_VARIABLE
    if path is not None:
        where = f"--token-file {path}"
        token = read_text(path, what="--token-file").strip()
    if token is None:
        return None
    if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{where} has a token of {len(token)} characters; it takes at least "
                          f"{MIN_TOKEN_CHARACTERS}, printable ASCII")  # fmt: skip
    return token


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror}") from error
