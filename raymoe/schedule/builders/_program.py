"""What each operation reads and writes: the only place that says so."""

from raymoe.schedule.graph import Schedule
from raymoe.schedule.task import Buffer, Op, Resource, Task


class Program:
    """Collects tasks in issue order; one method for each operation of a pass."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: list[Task] = []
        self._inputs: set[Buffer] = set()

    def schedule(self) -> Schedule:
        """The schedule of the tasks so far."""
        return Schedule(self._name, tuple(self._tasks), frozenset(self._inputs))

    def embed(self, part: int, resource: Resource) -> None:
        """Tokens of a wave to hidden states."""
        tokens = self._input("tokens", part)
        self._add(Op.EMBED, 0, part, resource, reads=(tokens,), writes=(_hidden(part),))

    def pre(self, layer: int, part: int, resource: Resource) -> None:
        """Norm, QKV projection, rotation."""
        reads = (_hidden(part), self._weights(layer, "attention"))
        self._add(Op.PRE, layer, part, resource, reads=reads, writes=(Buffer("qkv", (part,)),))

    def attend(self, layer: int, part: int, resource: Resource) -> None:
        """Append to the KV cache of the layer and attend."""
        cache = self._input("kv", layer, part)
        self._add(
            Op.ATTN,
            layer,
            part,
            resource,
            reads=(Buffer("qkv", (part,)), cache),
            writes=(cache, Buffer("attention", (part,))),
        )

    def post(self, layer: int, part: int, resource: Resource) -> None:
        """Output projection, residual, norm, router."""
        reads = (_hidden(part), Buffer("attention", (part,)), self._weights(layer, "attention"))
        writes = (_hidden(part), Buffer("routed", (part,)))
        self._add(Op.POST, layer, part, resource, reads=reads, writes=writes)

    def experts(self, layer: int, part: int, resource: Resource) -> None:
        """The feed-forward network of a wave."""
        reads = (_hidden(part), Buffer("routed", (part,)), self._weights(layer, "experts"))
        self._add(Op.EXPERTS, layer, part, resource, reads=reads, writes=(_hidden(part),))

    def head(self, layer: int, part: int, resource: Resource) -> None:
        """Final norm and logits of the rows that need them."""
        self._add(
            Op.HEAD,
            layer,
            part,
            resource,
            reads=(_hidden(part),),
            writes=(Buffer("logits", (part,)),),
        )

    def _add(  # noqa: PLR0917 - private constructor of a task
        self,
        op: Op,
        layer: int,
        part: int,
        resource: Resource,
        reads: tuple[Buffer, ...],
        writes: tuple[Buffer, ...],
    ) -> None:
        self._tasks.append(
            Task(op=op, layer=layer, part=part, resource=resource, reads=reads, writes=writes)
        )

    def _input(self, name: str, *key: int) -> Buffer:
        buffer = Buffer(name, key)
        self._inputs.add(buffer)
        return buffer

    def _weights(self, layer: int, module: str) -> Buffer:
        return self._input(f"{module}_weights", layer)


def _hidden(part: int) -> Buffer:
    return Buffer("hidden", (part,))
