"""Policy: the sizes of a run."""

from dataclasses import dataclass

from raymoe.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Numbers that decide how a run is cut; after planning every one is set.

    Attributes:
        batch_size: Sequences that are live at once.
        pass_tokens: Tokens of a pass, decode and prefill together; at least one each.
        prefill_chunk_tokens: Prompt tokens of one sequence in one pass.
        num_kv_blocks: Blocks of the KV cache.
    """

    batch_size: int
    pass_tokens: int
    prefill_chunk_tokens: int
    num_kv_blocks: int

    def __post_init__(self) -> None:
        for field in ("batch_size", "pass_tokens", "prefill_chunk_tokens", "num_kv_blocks"):
            value = getattr(self, field)
            if type(value) is not int or value < 1:
                raise ConfigError(f"Policy.{field} is {value!r}; it must be a positive integer")
