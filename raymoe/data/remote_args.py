"""Where actors may run, by the names of Ray's own options, and which nodes that leaves."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ray._common.ray_option_utils import validate_actor_options
from ray._raylet import node_labels_match_selector  # type: ignore[attr-defined]  # Cython
from ray.runtime_env import RuntimeEnv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raymoe.data.nodes import ACCELERATOR, NODE_LABEL, Node
from raymoe.errors import ConfigError

# Of `Dataset.map_batches` and `ray.remote`; the last has others of the latter.
MORE = "ray_remote_args"
NAMES = frozenset(
    ("label_selector", "fallback_strategy", "accelerator_type", "resources", "runtime_env",
     "scheduling_strategy", MORE)
)  # fmt: skip
STRATEGIES = ("DEFAULT", "SPREAD")
# The first have arguments of their own; the last would be the same for all actors of a pool.
_ELSEWHERE = {
    "num_cpus": "give it to map_batches_kwargs or generate itself",
    "num_gpus": "give it to map_batches_kwargs or generate itself",
    "memory": "give it to map_batches_kwargs or generate itself",
    "max_concurrency": "give rows_in_flight and batch_size instead",
    "name": "a pool has several actors",
    "get_if_exists": "a pool has several actors",
}

RemoteArgs = Mapping[str, Any]


def take_remote_args(options: dict[str, Any]) -> dict[str, Any]:
    """Take Ray's options of an actor out of those of a job, and have Ray check them.

    Raises:
        ConfigError: Ray has no such option or does not take the value, or it is given elsewhere.
    """
    named = {name: options.pop(name) for name in NAMES & options.keys()}
    more = named.pop(MORE, None) or {}
    if not isinstance(more, Mapping):
        raise ConfigError(f"{MORE} is {more!r:.60}; it has options of ray.remote by name")
    for name in more:
        if name in _ELSEWHERE:
            raise ConfigError(f"{MORE} has {name}; {_ELSEWHERE[name]}")
        if named.get(name) is not None:
            raise ConfigError(f"{name} is given by itself and in {MORE}; give it once")
    args = {name: value for name, value in {**named, **more}.items() if value is not None}
    for name, value in args.items():
        _check(name, value)
    return args


def _check(name: str, value: Any) -> None:
    if name == "scheduling_strategy" and isinstance(value, str) and value not in STRATEGIES:
        known = " or ".join(STRATEGIES)
        raise ConfigError(f"scheduling_strategy is {value!r:.60}; it takes {known}, or an object "
                          "of ray.util.scheduling_strategies")  # fmt: skip
    try:
        validate_actor_options({name: value}, in_options=True)
        if name == "label_selector":
            node_labels_match_selector({}, value)  # refuses values that are no text
        if name == "runtime_env":
            RuntimeEnv(**value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Ray does not take {name}={value!r:.80} for an actor: {error}"
        ) from error


def find_nodes(nodes: Sequence[Node], args: RemoteArgs) -> list[Node]:
    """Return the nodes on which Ray would place an actor with these options.

    Those of the fallback strategy count where none meets the label selector, as Ray tries them in
    this order.
    """
    nodes = [node for node in nodes if _has_resources(node, args)]
    fallbacks = args.get("fallback_strategy") or ()
    selectors = [args.get("label_selector"), *(one.get("label_selector") for one in fallbacks)]
    matching: Iterable[list[Node]] = (
        [node for node in nodes if node_labels_match_selector(node.labels, selector or {})]
        for selector in selectors
    )
    return next((found for found in matching if found), [])


def _has_resources(node: Node, args: RemoteArgs) -> bool:
    wanted = dict(args.get("resources") or {})
    accelerator = args.get("accelerator_type")
    if accelerator is not None:
        wanted[ACCELERATOR + accelerator] = 0.0
    strategy = args.get("scheduling_strategy")
    if isinstance(strategy, NodeAffinitySchedulingStrategy) and not strategy.soft:
        return bool(node.node_id == strategy.node_id)
    return all(
        name in node.resources and node.resources[name] >= amount for name, amount in wanted.items()
    )


def describe_lack(nodes: Sequence[Node], args: RemoteArgs) -> str:
    """Say what options no node meets, and what the nodes have instead."""
    names = ("label_selector", "fallback_strategy", "accelerator_type", "resources")
    asked = ", ".join(f"{name}={args[name]!r}" for name in names if name in args)
    labels = sorted({f"{name}={value}" for node in nodes for name, value in node.labels.items()
                     if name != NODE_LABEL})  # fmt: skip
    kinds = sorted(
        {name for node in nodes for name in node.resources if name.startswith(ACCELERATOR)}
    )
    has = f"labels {', '.join(labels) or 'none'}; {', '.join(kinds) or 'no accelerator types'}"
    return (
        f"no node of the cluster meets {asked or 'the scheduling strategy'}: its nodes have {has}"
    )
