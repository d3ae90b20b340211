"""Operations and bytes of a step by kind of operation, by hand and against sums over the model."""

import pytest

from raymoe.bench.workloads import SHAPES
from raymoe.plan.step_work import OperationKind, StepWork, Work, step_work
from raymoe.plan.work import MicroBatchShape, ModelWork
from raymoe.specs.attention.work import AttentionShape
from raymoe.specs.model import ModelSpec

# Two sequences that decode at contexts of 5 and 8, and a prompt of 3 tokens.
PAIRS, PROMPT_PAIRS, CONTEXT = 5 + 8, 1 + 2 + 3, 5 + 8 + 3
TOKENS, LOGITS = 2 + 3, 3
MIXED = MicroBatchShape(
    host=AttentionShape(
        rows=TOKENS, decode_rows=2, pairs=PAIRS, prompt_pairs=PROMPT_PAIRS, context_tokens=CONTEXT
    ),
    logit_rows=LOGITS,
)


def flop_of(work: StepWork) -> float:
    return sum(each.flop for entries in work.values() for each in entries)


def test_a_small_step_by_hand() -> None:
    hidden, heads, kv_heads, dim, experts, chosen, expert, vocabulary = 32, 4, 2, 8, 6, 2, 48, 100
    model = ModelSpec.from_config(
        {
            "model_type": "mixtral", "hidden_size": hidden, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": dim, "num_hidden_layers": 2,
            "num_local_experts": experts, "num_experts_per_tok": chosen,
            "intermediate_size": expert, "vocab_size": vocabulary,
        }
    )  # fmt: skip
    work = step_work(ModelWork.of(model, 2), MIXED, {0: 4, 1: 3})
    qkv, output = hidden * (heads + 2 * kv_heads) * dim, heads * dim * hidden
    assert work == {
        OperationKind.PROJECTIONS: [Work(2 * TOKENS * (qkv + output), 2 * (qkv + output))] * 2,
        OperationKind.ATTENTION: [
            Work(
                2 * 2 * heads * dim * (PAIRS + PROMPT_PAIRS),
                2 * 2 * kv_heads * dim * (CONTEXT + 2 * TOKENS),
            )
        ]
        * 2,
        OperationKind.ROUTER: [Work(2 * TOKENS * hidden * experts, 2 * hidden * experts)] * 2,
        OperationKind.EXPERTS: [
            Work(2 * TOKENS * chosen * 3 * hidden * expert, 2 * number * 3 * hidden * expert)
            for number in (4, 3)
        ],
        OperationKind.ELEMENTWISE: [
            Work(0, 2 * TOKENS * (9 * hidden + 2 * (heads + 2 * kv_heads) * dim))
        ]
        * 2,
        OperationKind.HEAD: [
            Work(2 * LOGITS * hidden * vocabulary, 2 * (hidden + LOGITS) * vocabulary)
        ],
        OperationKind.EMBEDDING: [Work(0, 2 * 2 * TOKENS * hidden)],
        OperationKind.SAMPLING: [Work(0, 2 * LOGITS * vocabulary)],
    }  # fmt: skip


@pytest.mark.parametrize("shape", ["mixtral", "qwen3", "hybrid"])
def test_kinds_add_up_to_the_work_of_the_model(shape: str) -> None:
    model = ModelWork.of(ModelSpec.from_config(SHAPES[shape]), 2)
    assert flop_of(step_work(model, MIXED)) == pytest.approx(
        TOKENS * model.token_flop
        + LOGITS * model.head_flop
        + PAIRS * model.pair_flop
        + PROMPT_PAIRS * model.prefill_pair_flop
    )
    every_expert = {i: float(layer.num_experts) for i, layer in enumerate(model.layers)}
    weights = step_work(model, MicroBatchShape(), every_expert).values()
    assert (
        sum(each.num_bytes for entries in weights for each in entries)
        == model.all_weight_bytes - model.head.num_bytes
    )


def test_states_are_read_and_written_by_decoding_rows_alone() -> None:
    model = ModelWork.of(ModelSpec.from_config(SHAPES["hybrid"]), 2)
    states = step_work(model, MIXED)[OperationKind.STATES]
    assert len(states) == 9
    assert states[0].num_bytes == 2 * 2 * model.layers[0].attention.state_bytes
    assert states[0].flop == TOKENS * model.layers[0].attention.token_flop


def test_attention_in_a_window_reads_no_more_than_it() -> None:
    config = SHAPES["mixtral"] | {"sliding_window": 4}
    model = ModelWork.of(ModelSpec.from_config(config), 2)
    (attention, *_) = step_work(model, MIXED)[OperationKind.ATTENTION]
    layer = model.layers[0]
    assert attention.num_bytes == layer.attention.kv_token_bytes * (4 + 4 + 3 + 2 * TOKENS)
    assert (
        attention.flop
        == layer.attention.pair_flop * (4 + 4) + layer.attention.prompt_pair_flop * PROMPT_PAIRS
    )


def test_the_longer_of_operations_and_bytes_counts() -> None:
    assert Work(6.0, 4.0).seconds(flop_per_s=2.0, bytes_per_s=2.0) == 3.0
    assert Work(6.0, 4.0).seconds(flop_per_s=4.0, bytes_per_s=2.0) == 2.0
