"""FlexGen's block schedule, with attention on the CPU (S3) and on the GPU (S4).

Both go through the waves of a layer one by one, start the copy of the next layer's weights as one
block at the first of them, and end each wave with a device-wide wait, as the loop over several
batches in FlexGen's `flex_opt.py` does. MoE-Lightning (ASPLOS 2025), figure 6, draws them as S3
and S4. Not taken over: attention and experts as two layers of their own (`sep_layer`), hidden
states kept on the host, copies through unpinned memory.
"""

from raymoe.schedule.builders._pages import plan_loads
from raymoe.schedule.builders._program import Program
from raymoe.schedule.builders.shape import PassForm, Step
from raymoe.schedule.graph import Schedule


def build_flexgen_s3(form: PassForm) -> Schedule:
    """Attention in line: pre, down to the CPU, up again, post, experts; nothing overlaps it."""
    program = Program("flexgen_s3", form, has_barriers=True)
    loads = plan_loads(form, interleaves=False)
    for wave in range(form.num_waves):
        program.embed(wave)
    for step in form.steps:
        for load in loads.get(step, ()):
            program.load_page(load)
        program.front(*step)
        if form.has_cpu_attention:
            program.load_hidden(*step)
        _finish(program, step)
    program.head()
    return program.schedule()


def build_flexgen_s4(form: PassForm) -> Schedule:
    """Attention on the GPU: the KV blocks of the next wave come while a wave is computed.

    New keys and values of a wave go to the host while the next wave is computed. Rows whose KV
    blocks the device has no room for attend on the CPU, in line as in S3.
    """
    steps = form.steps
    program = Program("flexgen_s4", form, ring=min(2, len(steps)), has_barriers=True)
    loads = plan_loads(form, interleaves=False)
    for wave in range(form.num_waves):
        program.embed(wave)
    if form.has_device_attention:
        program.load_kv(*steps[0])
    for index, step in enumerate(steps):
        for load in loads.get(step, ()):
            program.load_page(load)
        if form.has_device_attention and index + 1 < len(steps):
            program.load_kv(*steps[index + 1])
        if index:
            _store_new_kv(program, form, steps[index - 1])
        _attend_s4(program, form, step)
        _finish(program, step)
    _store_new_kv(program, form, steps[-1])
    program.head()
    return program.schedule()


def _attend_s4(program: Program, form: PassForm, step: Step) -> None:
    program.pre(*step)
    if form.has_cpu_attention:
        program.store_qkv(*step)
        program.attend(*step)
        program.load_hidden(*step)
    if form.has_device_attention:
        program.attend_on_device(*step)


def _store_new_kv(program: Program, form: PassForm, step: Step) -> None:
    """The device's share to the host; where the CPU attends, all of it is there already."""
    if not form.has_cpu_attention:
        program.store_qkv(*step)
    if form.has_device_attention:
        program.append(*step)


def _finish(program: Program, step: Step) -> None:
    program.post(*step)
    program.experts(step.layer, step.wave, (step.wave,))
    program.sync(*step)
