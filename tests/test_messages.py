"""Options and names that errors, log lines and help texts tell people to type exist."""

import ast
import dataclasses
import functools
import inspect
import re
from pathlib import Path

from raymoe.cli import COMMANDS
from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.generator import MoEGenerator
from raymoe.data.processor import MoEEngineProcessorConfig
from raymoe.data.sizing import configure_data_context, map_batches_kwargs
from raymoe.engine.engine import Engine
from raymoe.engine.tasks.rows import TaskOptions
from raymoe.plan.policy import DevicePolicy, Policy
from raymoe.plan.search import find_plan
from raymoe.specs.workload import Workload
from tests.test_documents import options_of

ROOT = Path(__file__).parent.parent
# Of other commands, in advice about them.
OPTIONS_OF_OTHERS = {
    "--generate": "ray get-auth-token",
    "--memory": "ray start",
    "--volume": "docker run",
    "--dry-run": "kubectl apply",
    "--dryrun": "sky jobs launch",
    "--cpu-bind": "srun",
    "--test-only": "sbatch",
    "--object-store-memory": "ray", "--cap-add": "docker", "--gpus": "docker", "--ulimit": "docker",
    "--shm-size": "docker",
    "--debug": "every command", "--help": "every command", "--version": "raymoe",
    "--install-completion": "raymoe", "--preferred": "numactl", "--show-completion": "raymoe",
}  # fmt: skip
NAMES_OF_OTHERS = {
    "batch_format": "map_batches of Ray",
    "map_batches": "Ray",
    "tie_word_embeddings": "a config.json",
}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
ADVICE = re.compile(
    r"\b(?:set|raise|reduce|lower|give|leave out|pass)\s+[`']?((?-i:[a-z]+(?:_[a-z]+)+))",
    re.IGNORECASE,
)
COMMAND = re.compile(rf"\braymoe ({'|'.join(COMMANDS)})\b([^;:,()\n]*)")


@functools.cache
def messages() -> list[tuple[str, str]]:
    """Where, and the text of each string of the package, with {} for what is filled in."""
    found = []
    for path in sorted((ROOT / "raymoe").rglob("*.py")):
        if path.parent.name in {"papers", "bench"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            parts = [node] if isinstance(node, ast.Constant) else getattr(node, "values", [])
            if isinstance(node, ast.Constant | ast.JoinedStr):
                texts = [
                    str(part.value)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                    else "{}"
                    for part in parts
                ]
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", "".join(texts)))
    return found


def known_names() -> set[str]:
    """Options and fields that a user can set in Python."""
    records = (SamplingParams, EngineConfig, TaskOptions, Policy, DevicePolicy, Workload)
    names = {field.name for record in records for field in dataclasses.fields(record)}
    for function in (MoEGenerator, map_batches_kwargs, find_plan, configure_data_context, Engine):
        names |= inspect.signature(function).parameters.keys()
    return names | {field.name for field in dataclasses.fields(MoEEngineProcessorConfig)}


def test_options_that_messages_name_exist() -> None:
    options = {command: options_of(command) for command in COMMANDS}
    known = set().union(*options.values()) | OPTIONS_OF_OTHERS.keys()
    wrong = []
    for where, text in messages():
        if "{" in text and text.lstrip().startswith((":root", "body", "<")):  # a page's style
            continue
        wrong += [f"{where}: {name}" for name in OPTION.findall(text) if name not in known]
        for command, rest in COMMAND.findall(text):
            allowed = options[command] | OPTIONS_OF_OTHERS.keys()
            wrong += [
                f"{where}: raymoe {command} {name}"
                for name in OPTION.findall(rest)
                if name not in allowed
            ]
    assert wrong == []


def test_names_that_messages_say_to_set_exist() -> None:
    known = known_names() | NAMES_OF_OTHERS.keys()
    wrong = [
        f"{where}: {name}"
        for where, text in messages()
        for name in ADVICE.findall(text)
        if name not in known
    ]
    assert wrong == []
