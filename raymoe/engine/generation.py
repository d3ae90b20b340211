"""What comes back for a row."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token under the model's own distribution (before any processing).

    Attributes:
        token_id: The token of the text.
        logprob: Its natural log probability.
        top: The most probable tokens and their log probabilities, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The answer to one prompt.

    Attributes:
        text: Decoded without special tokens, cut before a stop string.
        token_ids: What was generated, the token that ended it included.
        finish_reason: "stop" (EOS, stop token or stop string), "length" or "error".
        num_input_tokens: Tokens of the prompt, after truncation.
        num_generated_tokens: Length of `token_ids`.
        num_cached_tokens: Prompt tokens that were not computed for this sample but shared.
        logprobs: One entry for each of `token_ids`, when asked for.
        prompt_logprobs: One entry for each token of the prompt, None for the first.
        error: "" when fine, else "Type: message".
        others: Samples 1 to n - 1; this one is sample 0.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
    num_input_tokens: int = 0
    num_generated_tokens: int = 0
    num_cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str = ""
    others: tuple["Generation", ...] = ()

    @classmethod
    def from_error(cls, error: Exception, num_input_tokens: int = 0) -> "Generation":
        """The generation of a row that cannot be generated."""
        return cls(
            finish_reason="error",
            num_input_tokens=num_input_tokens,
            error=f"{type(error).__name__}: {error}",
        )
