"""Run a schedule on meanings instead of numbers: does each task find what it is about?

Each buffer holds a tuple that says what is in it, such as ("qkv", layer, micro-batch). A task
checks that what it reads is what its operation on this layer and micro-batch needs, and writes what
it makes. It knows the mathematics of a step and nothing of how builders name rings and slots.
"""

from collections.abc import Iterable

from raymoe.schedule.graph import Buffer, Op, Schedule, Task
from raymoe.schedule.program import StepForm, next_first_slot

Meaning = tuple[str | int, ...]
Memory = dict[Buffer, Meaning]

SAME_NAME = {"host_qkv": "qkv", "host_attention": "attention"}
"""Places on the host that hold the same thing as their counterpart on the device."""


def initial_memory(form: StepForm) -> Memory:
    """What the inputs of a step hold, including the slot that the step before has filled."""
    memory: Memory = {}
    for micro_batch in range(form.num_micro_batches):
        memory[Buffer("tokens", (micro_batch,))] = ("tokens", micro_batch)
    for layer, pages in enumerate(form.layers):
        memory[Buffer("resident", (layer,))] = ("resident", layer)
        memory[Buffer("host_experts", (layer,))] = ("host_experts", layer)
        for page in range(pages.num_pages):
            memory[Buffer("host_weights", (layer, page))] = ("page", layer, page)
        for micro_batch in range(form.num_micro_batches):
            for name in ("kv", "device_kv", "device_states"):
                memory[Buffer(name, (layer, micro_batch))] = (name, layer, micro_batch, "old")
    memory |= first_layer_in_slot(form, form.first_slot)
    return memory


def first_layer_in_slot(form: StepForm, slot: int) -> Memory:
    """The first streamed layer in a slot of the device."""
    if not form.streamed:
        return {}
    first = form.streamed[0]
    pages = form.layers[first]
    held: Memory = {}
    for page in range(pages.num_common_pages):
        held[Buffer("weights", (slot, page))] = ("page", first, page)
    for group, grouped in enumerate(pages.group_pages[: form.ring_slots]):
        for place, page in enumerate(grouped):
            held[Buffer("weights", (2 + group, place))] = ("page", first, page)
    return held


def run(schedule: Schedule, form: StepForm, order: Iterable[int]) -> Memory:
    """Run all tasks in an order and check the results; returns what memory holds then."""
    memory = initial_memory(form)
    for index in order:
        perform(schedule.tasks[index], form, memory)
    check_results(form, memory)
    return memory


def perform(task: Task, form: StepForm, memory: Memory) -> None:
    found = {memory[buffer] for buffer in task.reads if buffer.name != "turn"}
    assert found == needs(task, form), f"{task} finds {found}, needs {needs(task, form)}"
    for buffer in task.writes:
        memory[buffer] = made(task, buffer, form)


def check_results(form: StepForm, memory: Memory) -> None:
    assert memory[Buffer("logits")] == ("logits",)
    for layer, pages in enumerate(form.layers):
        for micro_batch in range(form.num_micro_batches):
            for name, is_used in (
                ("kv", form.has_cpu_attention and not pages.states_on_device),
                ("device_kv", form.has_device_attention and not pages.states_on_device),
                ("device_states", pages.states_on_device),
            ):
                age = "new" if is_used else "old"
                assert memory[Buffer(name, (layer, micro_batch))] == (name, layer, micro_batch, age)
    for buffer, page in first_layer_in_slot(form, next_first_slot(form)).items():
        assert memory[buffer] == page


def needs(task: Task, form: StepForm) -> set[Meaning]:
    """What a task must find in what it reads: all of this and nothing else."""
    layer, part = task.layer, task.part
    qkv: Meaning = ("qkv", layer, part)
    found: dict[Op, set[Meaning]] = {
        Op.EMBED: {("tokens", part)},
        Op.UP: {("embedded", part)},
        Op.PRE: {("into", layer, part)} | attention_weights(layer, form),
        Op.QKV: {qkv},
        Op.ATTN: {qkv, ("kv", layer, part, "old")},
        Op.KV: {("device_kv", layer, part, "old")},
        Op.APPEND: {qkv, ("device_kv", layer, part, "old")},
        Op.GATTN: {qkv, device_cache(task, form)},
        Op.HID: {("attention", layer, part)},
        Op.POST: {("into", layer, part)} | attended(task, form) | attention_weights(layer, form),
        Op.ROWS: of_written(task, "after post", "routed"),
        Op.CEXPERTS: of_written(task, "host_rows") | {("host_experts", layer)},
        Op.SUMS: {("host_sum", layer, *buffer.key) for buffer in task.reads},
        Op.EXPERTS: expert_inputs(task, form) if task.op is Op.EXPERTS else set(),
        Op.STAGE: {("page", layer, part)},
        Op.W: {("page", layer, part)},
        Op.SYNC: set(),
        Op.HEAD: {("into", layer, micro_batch) for micro_batch in range(form.num_micro_batches)},
    }
    return found[task.op]


def attention_weights(layer: int, form: StepForm) -> set[Meaning]:
    pages = form.layers[layer].attention_pages if layer < form.num_layers else ()
    return {("resident", layer), *(("page", layer, page) for page in pages)}


def expert_inputs(task: Task, form: StepForm) -> set[Meaning]:
    return routed(task, form) | expert_weights(task, form)


def expert_weights(task: Task, form: StepForm) -> set[Meaning]:
    pages = form.layers[task.layer]
    group, num_groups = task.part % pages.num_groups, pages.num_groups
    common = set(pages.expert_pages) & set(range(pages.num_common_pages))
    of_group = set(pages.group_pages[group]) if group < len(pages.group_pages) else common
    if group + 1 == num_groups:  # computes the shared expert too
        of_group |= common
    return {("resident", task.layer), *(("page", task.layer, page) for page in of_group)}


def has_states(task: Task, form: StepForm) -> bool:
    return task.layer < form.num_layers and form.layers[task.layer].states_on_device


def device_cache(task: Task, form: StepForm) -> Meaning:
    layer, part = task.layer, task.part
    if has_states(task, form):
        return ("device_states", layer, part, "old")
    return ("staged_kv", layer, part)


def attended(task: Task, form: StepForm) -> set[Meaning]:
    if has_states(task, form):
        return {("device_attention", task.layer, task.part)}
    shares = {"attention": form.has_cpu_attention, "device_attention": form.has_device_attention}
    return {(name, task.layer, task.part) for name, is_used in shares.items() if is_used}


def routed(task: Task, form: StepForm) -> set[Meaning]:
    pages = form.layers[task.layer]
    launch, group = divmod(task.part, pages.num_groups)
    sums = (f"sum of {group} groups",) if group else ()
    found = of_written(task, "after post", "routed", *sums)
    if group == pages.num_device_groups:
        found.add(("returned_sum", task.layer, launch))
    return found


def of_written(task: Task, *names: str) -> set[Meaning]:
    """What these hold for the micro-batches that the task writes."""
    micro_batches = [buffer.key[0] for buffer in task.writes if buffer.key]
    return {(name, task.layer, micro_batch) for name in names for micro_batch in micro_batches}


def made(task: Task, buffer: Buffer, form: StepForm) -> Meaning:
    """What a task leaves in a buffer that it writes."""
    if buffer.name == "expert_sum":
        group = task.part % form.layers[task.layer].num_groups
        return (f"sum of {group + 1} groups", task.layer, *buffer.key)
    layer, part = task.layer, task.part
    name = SAME_NAME.get(buffer.name, buffer.name)
    hidden: dict[Op, Meaning] = {
        Op.EMBED: ("into", 0, part),
        Op.UP: ("into", 0, part),
        Op.POST: ("after post", layer, part),
        Op.EXPERTS: ("into", layer + 1, *buffer.key),
    }
    special: dict[str, Meaning] = {
        "host_rows": (name, layer, *buffer.key),
        "host_sum": (name, layer, *buffer.key),
        "embedded": (name, part),
        "hidden": hidden.get(task.op, ()),
        "kv": (name, layer, part, "new"),
        "device_kv": (name, layer, part, "new"),
        "device_states": (name, layer, part, "new"),
        "weights": ("page", layer, part),
        "staging": ("page", layer, part),
        "logits": (name,),
    }
    return special.get(name, (name, layer, part))
