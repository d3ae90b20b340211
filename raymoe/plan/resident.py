"""A model that lies on the GPU with its KV cache: passes without transfers, and their sizes."""

import itertools
from dataclasses import dataclass, replace
from typing import NoReturn

from raymoe.errors import InfeasiblePlanError
from raymoe.plan.device_cost import DeviceCost
from raymoe.plan.device_job import DeviceJob
from raymoe.plan.device_memory import kv_block_bytes, resident_footprint
from raymoe.plan.footprint import Footprint
from raymoe.plan.job import estimate_job
from raymoe.plan.knobs import Grid
from raymoe.plan.load import PassLoad
from raymoe.plan.policy import Policy
from raymoe.plan.work import ModelWork
from raymoe.schedule.builders.in_place import build_resident
from raymoe.schedule.graph import Schedule
from raymoe.schedule.simulate import simulate
from raymoe.schedule.timeline import Timeline
from raymoe.specs.hardware import HardwareSpec


class ResidentPass:
    """Passes on a GPU that holds everything."""

    def __init__(self, work: ModelWork, hardware: HardwareSpec) -> None:
        self._work, self._hardware = work, hardware
        self._schedule = build_resident(len(work.layers))

    def schedule(self, load: PassLoad) -> Schedule:
        """The schedule of a pass, whatever it holds."""
        del load
        return self._schedule

    def timeline(self, load: PassLoad) -> Timeline:
        """The predicted timeline of a pass."""
        waves = load.waves(1, cpu_attention_fraction=0.0)
        return simulate(self._schedule, DeviceCost(self._work, self._hardware, waves))

    def seconds(self, load: PassLoad) -> float:
        """Its length."""
        return self.timeline(load).makespan_s if load.tokens else 0.0


@dataclass(frozen=True, slots=True)
class ResidentSearch:
    """Chooses sizes for one job."""

    job: DeviceJob

    def best(self, grid: Grid | None = None) -> Policy | None:
        """The sizes with which the job ends first; None where the model does not fit."""
        grid = grid or Grid()
        sizes = itertools.product(grid.pass_tokens, grid.batch_share)
        fitting = [policy for policy in itertools.starmap(self.policy, sizes) if policy is not None]
        return min(fitting, key=self.seconds, default=None)

    def seconds(self, policy: Policy) -> float:
        """Of the whole job."""
        passes = ResidentPass(self.job.work, self.job.hardware)
        return estimate_job(self.job.workload, policy, passes.seconds).seconds

    def policy(self, pass_tokens: int, batch_share: float) -> Policy | None:
        """The policy that fills the device; None where not even one sequence fits."""
        job = self.job
        bare = Policy(
            batch_size=1,
            pass_tokens=pass_tokens,
            prefill_chunk_tokens=pass_tokens,
            num_kv_blocks=1,
        )
        free = job.hardware.gpu_memory_bytes - self.footprint(bare).total
        num_blocks = 1 + free // kv_block_bytes(job.work)
        batch_size = min(job.batch_size(num_blocks, batch_share), pass_tokens)
        if batch_size < 1:
            return None
        useful = job.useful_blocks(num_blocks, batch_size)
        return replace(bare, batch_size=batch_size, num_kv_blocks=useful)

    def footprint(self, policy: Policy) -> Footprint:
        """Device memory of a policy."""
        return resident_footprint(self.job.model, self.job.work, policy)

    def refuse(self) -> NoReturn:
        """Say what the smallest policy needs, where no policy fits.

        Raises:
            InfeasiblePlanError: With the table of the memory that does not hold it.
        """
        tokens = min(Grid().pass_tokens)
        smallest = Policy(
            batch_size=1,
            pass_tokens=tokens,
            prefill_chunk_tokens=tokens,
            num_kv_blocks=self.job.least_blocks,
        )
        self.check(smallest)
        raise InfeasiblePlanError(
            f"{self.job.model.name} fits {self.job.hardware.name}, but no policy does"
        )

    def check(self, policy: Policy) -> None:
        """Refuse a policy that does not fit.

        Raises:
            InfeasiblePlanError: With the table of the memory that does not hold it.
        """
        self.footprint(policy).check_fits(
            self.job.hardware.gpu_memory_bytes,
            what=f"{self.job.model.name} on the GPU alone",
            advice="Let the weights stream (schedule 'auto'), reduce num_kv_blocks or pass_tokens, "
            "or choose a larger GPU.",
        )
