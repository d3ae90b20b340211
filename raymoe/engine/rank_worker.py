"""The process of a rank other than the first: loads its share and runs the passes that it is told.

It lives as long as the pipe to the first rank: a thread reads the pipe and ends the process when
the other end is closed, whatever the computation is waiting for. Nothing has to be tidied up that
the operating system does not.
"""

import os
import queue
import sys
import threading
from multiprocessing.connection import Connection

import torch

from raymoe.device.rank_group import PeerError, RankGroup
from raymoe.engine.load_job import RankShare, open_weights
from raymoe.engine.rank_messages import Begin, Failed, RankPass, Reached, receive, send
from raymoe.engine.runner_loading import load_runner
from raymoe.kernels.threads import set_num_threads
from raymoe.specs.model import ModelSpec

MAX_ERROR_CHARACTERS = 4000


def main(descriptor: int) -> None:
    """Serve rank 0 through the pipe of this descriptor."""
    connection = Connection(descriptor)
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    listener = threading.Thread(target=_listen, args=(connection, inbox), daemon=True)
    listener.start()
    try:
        _serve(connection, inbox)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        send(connection, Failed(text[:MAX_ERROR_CHARACTERS], _is_consequence(error)))
        sys.exit(1)


def _is_consequence(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, PeerError):
        error = error.__cause__
    return error is not None


def _listen(connection: Connection, inbox: "queue.SimpleQueue[object]") -> None:
    try:
        while True:
            inbox.put(receive(connection))
    except (EOFError, OSError):
        os._exit(0)  # the engine is closed, or gone


def _serve(connection: Connection, inbox: "queue.SimpleQueue[object]") -> None:
    begin = inbox.get()
    assert isinstance(begin, Begin)
    job, rank = begin.job, begin.rank
    send(connection, Reached("imported"))
    device = torch.device("cuda", rank) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # for whatever asks for the current one
    group = RankGroup(
        begin.meeting_place,
        rank,
        job.num_ranks,
        device=device,
        timeout_s=job.pass_limit_s,
    )
    set_num_threads(job.hardware.num_cores, job.num_torch_threads)
    model = ModelSpec.from_directory(job.directory)
    weights = open_weights(model, job.directory, job.config)
    share = RankShare.of(model, weights, rank=rank, num_ranks=job.num_ranks)
    runner = load_runner(job, share, group.all_reduce).runner
    send(connection, Reached("loaded"))
    while True:
        message = inbox.get()
        assert isinstance(message, RankPass)
        runner.run(message.inputs())
