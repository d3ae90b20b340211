"""Jobs that are disturbed: rows, operators that break in ways of their own, and a small cluster.

A module of its own, because workers import it.
"""

import contextlib
import json
import os
import random
import threading
import time
from pathlib import Path

import psutil
import pyarrow as pa
import ray
import ray.data
from ray.cluster_utils import Cluster

import raymoe
from raymoe.config import EngineConfig, SamplingParams
from raymoe.data.generator import MoEGenerator
from raymoe.data.quarantine import DEATH
from raymoe.data.sizing import map_batches_kwargs
from tests.ray.logged import LoggedGenerator, read_log

PARAMS = SamplingParams(max_tokens=24, temperature=1.0)
CONFIG = EngineConfig(device="cpu", host_memory_bytes=3 * 2**29, num_threads=1)
ROWS_PER_BLOCK, ROWS_IN_FLIGHT = 16, 128
LONGEST_JOB_S = 280
POISON, ALLOWED, LOADS = "<<poison>>", "allowed", "loads"
NODE = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 * 2**20}


def make_rows(num_rows, *, max_tokens=24):
    """Rows of different lengths."""
    lengths = random.Random(0)
    return [
        {
            "id": f"row-{index}",
            "prompt": f"prompt {index % 97}",
            "sampling_params": {"max_tokens": lengths.randint(1, max_tokens)},
        }
        for index in range(num_rows)
    ]


class HeldBack(LoggedGenerator):
    """Takes no rows while as many are finished as `Job.allow` says: no job outruns its test."""

    def __init__(self, *args, log, **kwargs):
        super().__init__(*args, log=log, **kwargs)
        self.finished = Path(log)

    def __call__(self, batch):
        while num_lines(self.finished) >= int(self.finished.with_name(ALLOWED).read_text()):
            time.sleep(0.1)
        return super().__call__(batch)


class LoadsSlowly(LoggedGenerator):
    """Writes down which process begins to load, and can be disturbed before it is done."""

    def __init__(self, *args, log, **kwargs):
        with Path(log).with_name(LOADS).open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(4)
        super().__init__(*args, log=log, **kwargs)


class BreaksInSteps(LoggedGenerator):
    """Runs `before_step` in the engine's thread, with the number and the tokens of each step."""

    def __init__(self, *args, mark=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.mark = None if mark is None else Path(mark)
        core = self._engine._core
        core._runner = _Watched(core._runner, self.before_step)

    def before_step(self, number, tokens):
        raise NotImplementedError

    def is_first(self):
        """Whether nobody was here before; in whatever process."""
        with contextlib.suppress(FileExistsError):
            self.mark.touch(exist_ok=False)
            return True
        return False


class _Watched:
    def __init__(self, runner, before_step):
        self.runner, self.before_step, self.num_steps = runner, before_step, 0

    def __getattr__(self, name):
        return getattr(self.runner, name)

    def run(self, batch):
        self.num_steps += 1
        self.before_step(self.num_steps, _as_bytes(batch.token_ids.tolist()))
        return self.runner.run(batch)


def _as_bytes(tokens):
    return b"".join(token.to_bytes(2, "big") for token in tokens)


class Poisoned(BreaksInSteps):
    """A prompt kills the process, as a kernel that writes where it should not."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.poison = _as_bytes(self._engine._parts.tokenizer.encode(POISON).tolist())

    def before_step(self, number, tokens):
        if self.poison in tokens:
            psutil.Process().kill()


class PoisonedEngine(Poisoned):
    """A prompt breaks the engine instead."""

    def before_step(self, number, tokens):
        if self.poison in tokens:
            raise RuntimeError("this prompt is poison")


class RaisesOnce(BreaksInSteps):
    """A pass of one process fails."""

    def before_step(self, number, tokens):
        if number == 20 and self.is_first():
            raise RuntimeError("the card fell off the bus")


class StuckOnce(BreaksInSteps):
    """A pass of one process never ends."""

    def before_step(self, number, tokens):
        if number == 20 and self.is_first():
            threading.Event().wait()


@contextlib.contextmanager
def small_cluster(num_nodes, *, num_gpus=1, environment=None):
    """A head without an engine and nodes with one each; yields the cluster and its nodes.

    Actors and what they start have the variables of `environment` too.
    """
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "num_gpus": 0,
            "object_store_memory": 150 * 2**20,
            "include_dashboard": False,
            "_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 3},
        },
    )
    try:
        nodes = [cluster.add_node(**NODE | {"num_gpus": num_gpus}) for _ in range(num_nodes)]
        cluster.wait_for_nodes()
        places = [Path(raymoe.__file__).parents[1], Path(__file__).parents[2]]
        path = os.pathsep.join(dict.fromkeys(map(str, places)))
        ray.init(
            address=cluster.address,
            log_to_driver=False,
            logging_level="error",
            runtime_env={"env_vars": {"PYTHONPATH": path, **(environment or {})}},
        )
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_no_progress_timeout_s = 120  # rather a failure than a job that hangs
        yield cluster, nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


class Job:
    """One job over rows, in a thread of its own, so that it can be disturbed and given up.

    Rows whose cells have no common types come as `tables`.
    """

    def __init__(
        self,
        model,
        rows,
        place,
        operator=LoggedGenerator,
        *,
        num_actors=1,
        rows_in_flight=ROWS_IN_FLIGHT,
        tables=None,
        mark=None,
        **options,
    ):
        self.log, self.tables, self.error = place / "generated.log", [], None
        self.ids = [row["id"] for row in rows]
        options = {"engine_config": CONFIG, "sampling_params": PARAMS, **options}
        arguments = map_batches_kwargs(
            model,
            num_actors=num_actors,
            batch_size=ROWS_PER_BLOCK,
            rows_in_flight=rows_in_flight,
            num_gpus=1,
            num_cpus=0,  # reads and writes take what there is
            memory=0,
            id_column="id",
            journal_dir=place / "journal",
            **options,
        )
        of_subclass = {"log": str(self.log)} | ({} if mark is None else {"mark": str(mark)})
        arguments["fn_constructor_kwargs"].update(of_subclass)
        self.actor_name = operator.__name__
        num_blocks = len(rows) // ROWS_PER_BLOCK
        dataset = (
            ray.data.from_items(rows, override_num_blocks=num_blocks)
            if tables is None
            else ray.data.from_arrow(tables)
        )
        self._dataset = dataset.map_batches(operator, **arguments)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            for table in self._dataset.iter_batches(
                batch_size=None, batch_format="pyarrow", prefetch_batches=0
            ):
                self.tables.append(table)
        except BaseException as error:
            self.error = error

    @property
    def is_running(self):
        return self._thread.is_alive()

    def num_logged(self):
        return num_lines(self.log)

    def allow(self, num_rows):
        """Let an operator that is `HeldBack` finish so many, and what it has begun besides."""
        allow(self.log.parent, num_rows)

    def wait_for_rows(self, num_rows):
        """Until so many rows were generated, by whomever."""
        limit_s = time.monotonic() + LONGEST_JOB_S
        while self.num_logged() < num_rows:
            assert self.is_running, f"the job ended too early: {self.error}"
            assert time.monotonic() < limit_s, "no rows"
            time.sleep(0.005)

    def actors(self):
        """The processes of the operator's actors."""
        found = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if any(f"({self.actor_name})" in part for part in child.cmdline()):
                    found.append(child)
        return found

    def finish(self, longest_s=LONGEST_JOB_S):
        """Wait for the end; fails where the job failed or hung."""
        self._thread.join(longest_s)
        assert not self.is_running, "the job hangs"
        if self.error is not None:
            raise self.error

    def rows(self):
        """The finished job's rows."""
        self.finish()
        return rows_of(pa.concat_tables(self.tables))

    def num_deaths(self):
        """Processes that have died so far and were noticed."""
        return len(list((self.log.parent / "journal").glob(f"{DEATH}*")))

    def num_regenerated(self):
        """Rows that were generated again."""
        logged = read_log(self.log, self.ids)
        return len(logged) - len(set(logged))


def allow(place, num_rows):
    new = place / f"{ALLOWED}.new"
    new.write_text(str(num_rows))
    new.replace(place / ALLOWED)


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def rows_of(table):
    """Each row as bytes, by its id; ids must be unique."""
    lines = {row["id"]: json.dumps(row).encode() for row in table.to_pylist()}
    assert len(lines) == table.num_rows, "an id came out twice"
    return lines


def undisturbed(model, rows):
    """What the rows give in one process without Ray, sixteen at a time."""
    operator = MoEGenerator(model, sampling_params=PARAMS, id_column="id", engine_config=CONFIG)
    with contextlib.closing(operator):
        table = pa.Table.from_pylist(rows)
        parts = [operator(table.slice(begin, 512)) for begin in range(0, len(rows), 512)]
    return rows_of(pa.concat_tables(parts))
