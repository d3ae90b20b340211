"""What rank 0 and the other ranks tell each other, over a pipe between a process and its child."""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raymoe.engine.load_job import LoadJob
from raymoe.kernels.cpu_attention import AttentionBatch
from raymoe.runtime.bindings import PassInputs

Array = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """The first message to a rank.

    Attributes:
        rank: Which one it is.
        meeting_place: Of its `RankGroup`.
    """

    rank: int
    meeting_place: Path
    job: LoadJob


@dataclass(frozen=True, slots=True)
class Reached:
    """A rank has come so far: "imported", then "loaded"."""

    stage: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank ends.

    Attributes:
        error: Why.
        is_consequence: Whether it is because another rank has ended.
    """

    error: str
    is_consequence: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPass:
    """The tokens of one pass without what is asked of them; see `PassInputs`."""

    token_ids: Array
    positions: Array
    query_start: Array
    context_tokens: Array
    block_table: Array
    sequence_prompts: Array | None
    prompt_tokens: Array | None

    @classmethod
    def of(cls, inputs: PassInputs) -> Self:
        """What another rank needs of a pass."""
        batch = inputs.attention
        return cls(
            token_ids=inputs.token_ids.numpy(),
            positions=inputs.positions.numpy(),
            query_start=batch.query_start.numpy(),
            context_tokens=batch.context_tokens.numpy(),
            block_table=batch.block_table.numpy(),
            sequence_prompts=_array(batch.prompt_tokens),
            prompt_tokens=_array(inputs.prompt_tokens),
        )

    def inputs(self) -> PassInputs:
        """The pass of a rank from which nobody wants logits."""
        return PassInputs(
            token_ids=torch.from_numpy(self.token_ids),
            positions=torch.from_numpy(self.positions),
            attention=AttentionBatch(
                query_start=torch.from_numpy(self.query_start),
                context_tokens=torch.from_numpy(self.context_tokens),
                block_table=torch.from_numpy(self.block_table),
                prompt_tokens=_tensor(self.sequence_prompts),
            ),
            logit_rows=torch.empty(0, dtype=torch.int64),
            on_logits=_nobody_listens,
            prompt_tokens=_tensor(self.prompt_tokens),
        )


def send(connection: Connection, message: object) -> None:
    """Send a message; torch's own pickling of connections would share memory by descriptors.

    Raises:
        OSError: The other process is gone.
    """
    connection.send_bytes(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> object:
    """The next message.

    Raises:
        EOFError: The other process is gone.
    """
    return pickle.loads(connection.recv_bytes())  # from our own process or child, nobody else


def _nobody_listens(first_row: int, logits_CV: Tensor) -> None:
    raise AssertionError(f"logits of {len(logits_CV)} rows from {first_row} of a rank without any")


def _array(tensor: Tensor | None) -> Array | None:
    return None if tensor is None else tensor.numpy()


def _tensor(array: Array | None) -> Tensor | None:
    return None if array is None else torch.from_numpy(array)
