import json
import re
import struct
from collections import Counter
from datetime import date
from pathlib import Path

import pytest

from raymoe.assets import demo_model_path
from raymoe.assets.wrangling import (
    KINDS,
    TRAINING_SEED_START,
    WranglingRow,
    is_held_out,
    make_rows,
)

ANSWER_PATTERNS = {
    "date": r"\d{4}-\d{2}-\d{2}",
    "phone": r"\+[1-9]\d{9,13}",
    "amount": r"\d+\.\d{2} (USD|EUR|GBP|JPY|CHF|INR|CAD)",
    "name": r"[^\W\d_a-z][\w'-]+, [^\W\d_a-z][\w'-]+",
    "unit": r"\d+(\.\d*[1-9])? (g|mm|ml)",
}
MAX_WEIGHTS_BYTES = 8_000_000


def rows_of_kind(kind: str, num_rows: int = 500) -> list[WranglingRow]:
    rows = make_rows(num_rows * len(KINDS), seed=7)
    return [row for row in rows if row.kind == kind]


def digits_of(text: str) -> str:
    return re.sub(r"\D", "", text)


def read_safetensors_header(path: Path) -> dict[str, dict[str, object]]:
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    return header


def test_equal_seeds_give_equal_rows_and_a_prefix_does_not_depend_on_the_length() -> None:
    rows = list(make_rows(50, seed=3))
    assert rows == list(make_rows(50, seed=3))
    assert rows[:20] == list(make_rows(20, seed=3))
    assert rows != list(make_rows(50, seed=4))


def test_kinds_take_turns() -> None:
    counts = Counter(row.kind for row in make_rows(100, seed=0))
    assert counts == dict.fromkeys(KINDS, 20)


def test_held_out_prompts_are_never_trained_on() -> None:
    trained = {row.prompt for row in make_rows(5000, seed=TRAINING_SEED_START)}
    held_out = [row.prompt for row in make_rows(200, seed=0, held_out=True)]
    assert all(map(is_held_out, held_out))
    assert not any(map(is_held_out, trained))
    assert trained.isdisjoint(held_out)


def test_a_prompt_has_one_answer() -> None:
    answers: dict[str, str] = {}
    for row in make_rows(20_000, seed=11):
        assert answers.setdefault(row.prompt, row.answer) == row.answer


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_answers_keep_their_form(kind: str) -> None:
    for row in rows_of_kind(kind):
        assert row.prompt.startswith(f"{kind}: ")
        assert row.prompt.endswith(" ->")
        assert re.fullmatch(ANSWER_PATTERNS[kind], row.answer)
        assert len(row.answer.encode()) < 24


def test_dates_keep_their_year_and_day() -> None:
    for row in rows_of_kind("date"):
        day = date.fromisoformat(row.answer)
        assert str(day.year) in row.prompt or f"'{day:%y}" in row.prompt
        assert str(day.day) in row.prompt


def test_phone_numbers_keep_the_order_of_their_digits() -> None:
    for row in rows_of_kind("phone"):
        prompt_digits = iter(digits_of(row.prompt))
        national = row.answer[2:] if row.answer.startswith("+1") else row.answer[1:]
        assert all(digit in prompt_digits for digit in national)


def test_names_keep_their_letters() -> None:
    for row in rows_of_kind("name"):
        family, given = row.answer.lower().split(", ")
        assert {family, given} <= set(re.findall(r"[\w'-]+", row.prompt.lower()))


@pytest.mark.parametrize(
    ("suffix", "power", "unit"), [("kg", 3, "g"), ("cm", 1, "mm"), ("cl", 1, "ml"), ("mg", -3, "g")]
)
def test_units_shift_the_decimal_point(suffix: str, power: int, unit: str) -> None:
    pattern = re.compile(rf" ~?([\d.]+) ?{suffix} *->$")
    matches = [(pattern.search(row.prompt), row.answer) for row in rows_of_kind("unit", 1000)]
    pairs = [(float(match[1]), answer) for match, answer in matches if match]
    assert pairs
    for value, answer in pairs:
        number, found_unit = answer.split()
        assert found_unit == unit
        assert float(number) == pytest.approx(value * 10**power)


def test_thousands_and_cents_reach_the_amount() -> None:
    rows = rows_of_kind("amount", 2000)
    in_thousands = [row for row in rows if re.search(r"\d[kK]", row.prompt)]
    with_cents = [row for row in rows if re.search(r"[.,]\d\d(\D|$)", row.prompt)]
    assert in_thousands
    assert with_cents
    assert all(row.answer.split()[0].endswith("00.00") for row in in_thousands)
    assert all(digits_of(row.prompt) == digits_of(row.answer).zfill(3) for row in with_cents)


def test_demo_weights_are_small_and_bfloat16() -> None:
    path = demo_model_path() / "model.safetensors"
    assert path.stat().st_size < MAX_WEIGHTS_BYTES
    assert {entry["dtype"] for entry in read_safetensors_header(path).values()} == {"BF16"}


@pytest.mark.parametrize(
    "text", ["date:  3rd ->", " a  b ", "€ ₹ 日本 \N{GRINNING FACE}\n\t\x00é", "", "don 't , . !"]
)
def test_tokenizer_restores_every_text(text: str) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_path())
    tokens = tokenizer.encode(text)
    assert tokens[0] == tokenizer.bos_token_id
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_chat_template_ends_with_the_prompt() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_path())
    for content in ("date: 1 May 2020", "date: 1 May 2020 ->"):
        messages = [{"role": "user", "content": content}]
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert tokens == tokenizer.encode("date: 1 May 2020 ->")


@pytest.mark.parametrize("num_rows", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_demo_model_answers_rows_it_has_not_seen(num_rows: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model_path())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        demo_model_path(), dtype=torch.bfloat16
    )
    rows = list(make_rows(num_rows, seed=5, held_out=True))
    inputs = tokenizer([row.prompt for row in rows], return_tensors="pt", padding=True)
    tokens = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
    answers = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    num_right = sum(row.answer == answer for row, answer in zip(rows, answers, strict=True))
    assert num_right >= 0.95 * num_rows
