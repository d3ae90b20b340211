"""`raymoe plan --write`: the file that runs a planned job on a cluster."""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self

import typer

from raymoe.errors import ConfigError
from raymoe.plan.cluster_file import KINDS, SHARED, ClusterJob, Machine, kind_of
from raymoe.plan.plan import Plan
from raymoe.plan.rank import JobPlanner, PriceList
from raymoe.specs.files import write_file
from raymoe.specs.hardware import HardwareSpec

Write = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Write a file that runs the job on the node of --hardware, or on the cheapest of the "
        "ranking: a cluster for Ray's launcher, a job for KubeRay or SLURM, or a task for "
        "SkyPilot.",
    ),
]
WriteAs = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help=f"Write this kind of file, one of {', '.join(KINDS)}; by default that of the node's "
        "cloud.",
    ),
]
Spot = Annotated[
    bool,
    typer.Option(
        "--spot",
        help="Rent instances that the cloud may take back, and rank nodes by their spot prices.",
    ),
]
Source = Annotated[
    str,
    typer.Option(
        "--input",
        metavar="PATH",
        help="Let the job of --write read its rows here; nodes must see it.",
    ),
]
Output = Annotated[
    str,
    typer.Option(
        metavar="PATH", help="Let the job of --write put its answers here; nodes must see it."
    ),
]
DEFAULT_SOURCE, DEFAULT_OUTPUT = f"{SHARED}/prompts", f"{SHARED}/answers"
# Options of `raymoe plan` that `raymoe generate` has too, and their defaults.
SAME_OPTIONS = {
    "task": "generate", "dtype": "auto", "host_memory": None, "device_memory": None,
    "currency": "USD",
}  # fmt: skip
OTHER_NAMES = {"max_context": "max_model_len", "tensor_parallel": "tensor_parallel_size"}
ENGINE_FIELDS = {"schedule": "auto", "kv_dtype": "auto", "state_dtype": "float32"}


@dataclass(frozen=True, kw_only=True)
class WantedFile:
    """The file that --write asks for.

    Attributes:
        given: All options of the command.
        written_by: The words of the command behind `raymoe plan`.
    """

    path: Path
    kind: str | None
    is_spot: bool
    given: Mapping[str, Any]
    written_by: Sequence[str]

    @classmethod
    def of(cls, given: Mapping[str, Any], arguments: Sequence[str]) -> Self | None:
        """What the options ask for; None without --write.

        Raises:
            ConfigError: Options that only a file has, without one.
        """
        if given["write"] is None:
            lone = {
                "--write-as": given["write_as"] is not None,
                "--input": given["source"] != DEFAULT_SOURCE,
                "--output": given["output"] != DEFAULT_OUTPUT,
            }
            named = [name for name, is_given in lone.items() if is_given]
            if named:
                raise ConfigError(f"{', '.join(named)} is for a file: name it with --write")
            return None
        return cls(
            path=given["write"], kind=given["write_as"], is_spot=given["spot"], given=given,
            written_by=tuple(arguments),
        )  # fmt: skip

    def node(self, name: str, hardware: HardwareSpec) -> HardwareSpec:
        """What a job has of a node: in a pod less memory than the node has.

        Raises:
            ConfigError: The kind of file is not one for this node.
        """
        machine = Machine.find(name, hardware)
        if kind_of(machine, self.kind) != "kuberay":
            return hardware
        bytes_of_pod = min(hardware.host_memory_bytes, machine.pod_bytes)
        return replace(hardware, host_memory_bytes=bytes_of_pod)

    def write(
        self,
        plan: Plan,
        planner: JobPlanner,
        *,
        num_nodes: int,
        name: str,
        prices: PriceList,
    ) -> None:
        """Write it for so many nodes of this name."""
        machine = Machine.find(name, plan.hardware)
        kind = kind_of(machine, self.kind)
        price = self.price(name, prices)
        job = ClusterJob(
            plan=plan,
            machine=machine,
            num_nodes=num_nodes,
            num_rows=planner.workload.num_rows,
            why_nodes=self._why_nodes(),
            model=self.given["model"],
            weight_bytes=plan.num_ranks * planner.model.weight_bytes(planner.bytes_per_element),
            options=(*self._max_tokens(planner), *self._options(price)),
            source=self.given["source"].rstrip("/"),
            output=self.given["output"].rstrip("/"),
            is_spot=self.is_spot,
            price=price,
            prices_of="" if self.given["price_per_hour"] else prices.date,
            written_by=self.written_by,
            file=str(self.path),
            adapter=None if self.given["adapter"] is None else str(self.given["adapter"]),
            **_versions(),
        )
        write_file(self.path, job.render(kind))
        typer.echo(f"{self.path}: raymoe doctor {self.path} checks it", err=True)

    def price(self, name: str, prices: PriceList) -> float | None:
        """US dollars for an hour of a node, as it is rented; None if it is not known."""
        return price_of(self.given, name, prices)

    def _why_nodes(self) -> str:
        if self.given["deadline_hours"] is not None:
            hours = self.given["deadline_hours"]
            return f"the fewest that end within {hours:g} hours (--deadline-hours)"
        if self.given["budget"] is not None:
            return f"as many as {self.given['budget']:,.2f} USD pay for (--budget)"
        return "as --nodes says" if self.given["nodes"] else "one, as nothing asks for more"

    def _max_tokens(self, planner: JobPlanner) -> tuple[str, ...]:
        workload = planner.workload
        if not workload.generates:
            return ()
        rows = workload.row_lengths or ((0, workload.generated_tokens),)
        return "--max-tokens", str(max(tokens for _, tokens in rows))

    def _options(self, price: float | None) -> list[str]:
        """What changes the plan must change the job as well."""
        given, words = self.given, []
        for name, default in SAME_OPTIONS.items():
            if given[name] != default:
                words += [f"--{name.replace('_', '-')}", str(given[name])]
        for name, other in OTHER_NAMES.items():
            if given[name] not in {None, 1}:
                words += [f"--{other.replace('_', '-')}", str(given[name])]
        for name, default in ENGINE_FIELDS.items():
            if given[name] != default:
                words += ["--engine-config", f"{name}={given[name]}"]
        if price is not None:
            words += ["--price-per-hour", f"{price:g}"]
        return words


def _versions() -> dict[str, str]:
    """Those of this machine, which nodes must have too."""
    return {
        "ray_version": importlib.metadata.version("ray"),
        "python_version": ".".join(platform.python_version_tuple()[:2]),
    }


def price_of(given: Mapping[str, Any], name: str, prices: PriceList) -> float | None:
    """The price of a node by the options of the command; None if it is not known."""
    price = prices.prices.get(name, prices.prices.get(name.lower()))
    if given["price_per_hour"] is not None or price is None:
        hourly: float | None = given["price_per_hour"]
        return hourly
    return price.spot if given["spot"] else price.on_demand
