"""Records: what comes back is what went in, and damage is seen wherever it is."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymoe.data import journal as records_module
from raymoe.data.journal import (
    MAGIC,
    DamagedRecordError,
    UnfinishedRecordError,
    decode_generation,
    encode_generation,
    pack_record,
    read_record,
    read_records,
)
from raymoe.engine.outputs import Generation, TokenLogprob
from tests.unit.data.journals import FULL, key_of

numbers = st.integers(0, 2**31 - 1)
logprobs = st.builds(
    TokenLogprob,
    numbers,
    st.floats(allow_nan=False),
    st.lists(st.tuples(numbers, st.floats(allow_nan=False)), max_size=2).map(tuple),
)
any_text = st.text(st.characters(exclude_categories=()))  # lone surrogates too
simple = st.fixed_dictionaries(
    {},
    optional={
        "text": any_text,
        "token_ids": st.lists(numbers).map(tuple),
        "finish_reason": st.sampled_from(["stop", "length", "error"]),
        "num_input_tokens": numbers,
        "num_generated_tokens": numbers,
        "num_cached_tokens": numbers,
        "logprobs": st.none() | st.lists(logprobs, max_size=3).map(tuple),
        "prompt_logprobs": st.none() | st.lists(st.none() | logprobs, max_size=3).map(tuple),
        "error": any_text,
    },
)
samples = simple.map(lambda fields: Generation(**fields))
generations = st.builds(
    lambda fields, others: Generation(**fields, others=tuple(others)),
    simple,
    st.lists(samples, max_size=2),
)


@given(generations)
def test_a_generation_comes_back_equal_in_every_field(generation):
    assert decode_generation(encode_generation(generation)) == generation


def test_all_that_a_generation_can_hold_comes_back():
    assert decode_generation(encode_generation(FULL)) == FULL


def opened(content):
    return io.BufferedReader(io.BytesIO(content))


def test_records_are_found_in_order_and_by_their_offsets():
    payloads = [b"a", b"b" * 1000, b"c" * 3]
    content = MAGIC + b"".join(pack_record(key_of(i), data) for i, data in enumerate(payloads))
    records = list(read_records(opened(content)))
    assert [record.payload for record in records] == payloads
    assert [record.key for record in records] == [key_of(i) for i in range(3)]
    assert records[-1].end == len(content)
    for record in records:
        assert read_record(opened(content), record.offset) == record


@pytest.mark.parametrize("tail", [b"\0" * 4096, b"\xff" * 40, b"garbage, garbage, garbage"])
def test_what_no_writer_wrote_is_no_record(tail):
    records = read_records(opened(MAGIC + pack_record(key_of(1), b"a") + tail))
    assert next(records).payload == b"a"
    with pytest.raises(DamagedRecordError, match=r"record at byte 33"):
        next(records)


def test_a_damaged_length_makes_nobody_read_more_than_the_limit(monkeypatch):
    content = MAGIC + pack_record(key_of(1), b"a" * 20)
    monkeypatch.setattr(records_module, "MAX_PAYLOAD_BYTES", 19)
    with pytest.raises(DamagedRecordError, match="byte 8 is damaged"):
        list(read_records(opened(content)))


def test_a_file_of_something_else_is_refused_and_an_empty_one_is_unfinished():
    with pytest.raises(DamagedRecordError, match="does not begin as a journal"):
        list(read_records(opened(b"PAR1PAR1PAR1")))
    for cut in range(len(MAGIC)):
        with pytest.raises(UnfinishedRecordError):
            list(read_records(opened(MAGIC[:cut])))
    assert list(read_records(opened(MAGIC))) == []
