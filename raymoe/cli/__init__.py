"""The `raymoe` command. Each subcommand is a module that loads when it is called.

To add one: write ``raymoe/cli/<name>.py`` with a function ``run`` whose parameters are typer's,
and name it in `COMMANDS`.
"""

import contextlib
import faulthandler
import importlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from raymoe._version import __version__
from raymoe.errors import EXIT_BAD_USAGE, ConfigError, RaymoeError
from raymoe.safe_text import harmless
from raymoe.shadows import directories_of_workers, find_shadow, first_directory
from raymoe.specs.files import is_hub_name, read_config
from raymoe.specs.model import ModelSpec
from raymoe.specs.presets_models import MODEL_PRESETS, model_preset
from raymoe.units import parse_bytes

COMMANDS = {
    "generate": "Generate text for every row of a table of prompts: parquet, JSON lines or CSV.",
    "serve": "Serve OpenAI's batch API over HTTP; each batch runs as raymoe generate.",
    "status": "Show the progress of a job and the state of its actors, while it runs or after it.",
    "report": "Write an HTML page with figures of a job, while it runs or after it.",
    "demo": "Tidy thousands of messy rows with the included model and check the answers.",
    "plan": "Choose batch sizes for a model, a node and a job, and predict speed, time and cost.",
    "models": "List the models and weight formats that run, or say whether a given model runs.",
    "compare": "Run schedules on an emulated GPU and compare predicted with measured times.",
    "profile": "Measure in a minute how fast the cores, memory, GPU and link of this machine are.",
    "doctor": "Check in at most five minutes that this machine computes correctly, and how fast.",
    "bench": "Measure engines, schedules or kernels, and compare them with what the machine "
    "allows.",
}
STARTS_RAY = {"generate", "serve", "demo"}
COMPLETE, COMPLETION_OPTIONS = "_RAYMOE_COMPLETE", {"--install-completion", "--show-completion"}
SLOW_S = 1.0
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # as of a process that SIGINT ends

_USAGE = "Usage: raymoe [--version] [--help] COMMAND [ARGS]..."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code: that of `_help`."""
    faulthandler.enable(2)  # a signal that ends the process says where on standard error
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # read when Ray is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run one command; return the exit code."""
    if COMPLETE in os.environ or (arguments and arguments[0] in COMPLETION_OPTIONS):
        return _complete(arguments)
    if not arguments or arguments[0] in {"--help", "-h"}:
        typer.echo(_help(), err=not arguments)
        return 0 if arguments else EXIT_BAD_USAGE
    name, rest = arguments[0], list(arguments[1:])
    if name == "--version":
        typer.echo(f"raymoe {__version__}")
        return 0
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        typer.echo(f"{_USAGE}\nerror: no {kind} {name!r}; try 'raymoe --help'", err=True)
        return EXIT_BAD_USAGE
    return _run_command(name, rest)


def _complete(arguments: Sequence[str]) -> int:
    """Install completion, or answer a shell; only a command that is typed already is imported."""
    typed = f"{os.environ.get('COMP_WORDS', '')} {os.environ.get('_TYPER_COMPLETE_ARGS', '')}"
    app = typer.Typer(pretty_exceptions_enable=False)
    for name, text in COMMANDS.items():
        is_typed = name in typed.split()
        function = importlib.import_module(f"raymoe.cli.{name}").run if is_typed else _help
        app.command(name, help=text)(function)
    try:
        app(args=list(arguments), prog_name="raymoe")
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else EXIT_FAILED
    return 0


def _run_command(name: str, arguments: list[str]) -> int:
    is_debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        _check_shadows(name)
        with _saying_if_slow(f"raymoe {name}: loading its libraries"):
            command = load_command(name)
        command(args=arguments, prog_name=f"raymoe {name}", obj=arguments)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        typer.echo("error: interrupted", err=True)
        return EXIT_INTERRUPTED
    except Exception as error:
        if is_debug:
            raise
        return _report(error)
    return 0


def load_command(name: str) -> Any:
    """The command of this name as typer makes it, with its options."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    function = importlib.import_module(f"raymoe.cli.{name}").run
    app.command(help=paragraphs(function))(function)
    return typer.main.get_command(app)


@contextlib.contextmanager
def _saying_if_slow(text: str) -> Iterator[None]:
    """Say what takes the time, on standard error, once it has taken some."""
    timer = threading.Timer(SLOW_S, typer.echo, (text,), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_shadows(command: str) -> None:
    """Refuse to run beside a file that hides a package that the command or its workers need."""
    where = directories_of_workers() if command in STARTS_RAY else first_directory()
    shadow = find_shadow(where)
    if shadow is not None:
        raise ConfigError(shadow)


def paragraphs(function: Callable[..., object]) -> str:
    """Return the docstring of a command without line ends inside paragraphs: terminals differ."""
    text = inspect.cleandoc(function.__doc__ or "")
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _report(error: Exception) -> int:
    text = f"{type(error).__name__}: {error}; --debug shows where"
    if isinstance(error, RaymoeError):
        text = str(error)
    elif isinstance(error, OSError) and error.strerror:  # of a path that the user gave
        where = "" if error.filename is None else f"{error.filename!s:.200}: "
        text = f"{where}{error.strerror}; check the path, its permissions and the free space"
    shown = harmless(text, keep="\n")  # rows and models have a say in it
    typer.echo(f"error: {shown}", err=True)
    return EXIT_BAD_USAGE if isinstance(error, ConfigError) else EXIT_FAILED


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        (
            _USAGE,
            "",
            "Offline, throughput-first inference of Mixture-of-Experts models on Ray Data.",
            "",
            "Commands:",
            *lines,
            "",
            "Every command has --help, and --debug, which prints the traceback of an error.",
            "--install-completion completes commands and options in this shell.",
            "Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.",
        )
    )


def size(text: object) -> int:
    """Parser of an option such as --host-memory 192GiB; typer sends the default through it, too."""
    return parse_bytes(str(text))


def model_by_name(text: str) -> ModelSpec:
    """The model of --model: a preset, a directory with a `config.json`, a hub's name or a URI.

    Raises:
        UnknownOptionError: Neither; names the nearest preset.
        ConfigError: A path where there is no directory, or a model that is not supported.
        CheckpointError: The directory's `config.json` cannot be read.
    """
    path = Path(text)
    if path.is_dir() and text.lower() not in MODEL_PRESETS:
        return ModelSpec.from_directory(path)
    if path.name == text:
        return model_preset(text)
    if text.count("/") == 1 and is_hub_name(text) and not path.parent.is_dir():
        # It is slow to import, and presets and directories do not need it.
        from raymoe.download.hub import fetch_config  # noqa: PLC0415

        config = fetch_config(text)
        return ModelSpec.from_config(read_config(config.parent), name=text)
    if "://" in text:
        from raymoe.download.models import fetch_files  # noqa: PLC0415 - as above

        return ModelSpec.from_directory(fetch_files(text))
    raise ConfigError(
        f"--model {text} is neither a directory nor a known model; give a directory with a "
        f"config.json, a name on the Hugging Face hub (OWNER/NAME), a URI (s3://...), or one of "
        f"{', '.join(MODEL_PRESETS)}"
    )
