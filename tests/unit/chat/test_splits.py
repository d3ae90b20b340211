"""Splits of transcripts: hand-made ones, and generated ones in the form of every family."""

# ruff: noqa: RUF001 - marks of DeepSeek

import functools
import json
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymoe.chat.reasoning import (
    HARMONY,
    MARKERS,
    REASONING_PARSERS,
    check_reasoning_parser,
    find_reasoning_parser,
    opens_reasoning,
    shortest_name,
    split_reasoning,
)
from raymoe.chat.tool_calls import (
    FORMS,
    ToolCall,
    check_tool_call_parser,
    find_tool_call_parser,
    split_tool_calls,
)
from raymoe.errors import ConfigError

WORDS = (
    *(
        "the",
        "sum",
        "is",
        "42",
        "Grüße",
        "語",
        "a < b",
        "{x}",
        "[1, 2]",
        "<b>",
        "\n",
        "\n\n",
        "```",
    ),
    *('"quoted"', "\\n", "🙂", "</p>", "functions", "name:", "&amp;", "'"),
)
random_seeds = given(seed=st.integers(0, 2**32))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "is_new": {"type": "boolean"},
                    "tags": {"type": "array"},
                    "options": {"type": "object"},
                },
            },
        },
    }
    for name in ("get_weather", "search-all", "a.b_2")
]


def text(choose: random.Random) -> str:
    return " ".join(choose.choices(WORDS, k=choose.randint(1, 12))).strip() or "x"


def arguments(choose: random.Random) -> dict:
    values = {
        "city": lambda: choose.choice((text(choose), "12", "true", '{"a": 1}')),
        "count": lambda: choose.randint(-5, 10**12),
        "ratio": choose.random,
        "is_new": lambda: choose.random() < 0.5,
        "tags": lambda: [text(choose) for _ in range(choose.randint(0, 3))],
        "options": lambda: {"deep": [None, {"x": text(choose)}]},
    }
    return {key: values[key]() for key in choose.sample([*values], choose.randint(0, 4))}


def calls(choose: random.Random) -> list[tuple[str, dict]]:
    names = [tool["function"]["name"] for tool in TOOLS]
    return [(choose.choice(names), arguments(choose)) for _ in range(choose.randint(1, 3))]


def plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def tagged(found: list, before: str, name: str, value: str, after: str) -> str:
    """Write calls with tagged parameters, as the templates do."""
    return "".join(
        before.format(call)
        + "".join(name.format(key) + plain(one) + value for key, one in given.items())
        + after
        for call, given in found
    )


def hermes(found: list) -> str:
    return "\n".join(
        "<tool_call>\n" + json.dumps({"name": name, "arguments": given}) + "\n</tool_call>"
        for name, given in found
    )


def deepseek(found: list, form: str) -> str:
    inner = "".join(
        "<｜tool▁call▁begin｜>" + form.format(name, json.dumps(given)) + "<｜tool▁call▁end｜>"
        for name, given in found
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def deepseek_v32(found: list) -> str:
    inner = "".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(one, str)).lower()}">'
            f"{plain(one)}</｜DSML｜parameter>\n"
            for key, one in given.items()
        )
        + "</｜DSML｜invoke>\n"
        for name, given in found
    )
    return f"<｜DSML｜function_calls>\n{inner}</｜DSML｜function_calls>"


def kimi(found: list) -> str:
    inner = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{json.dumps(given)}<|tool_call_end|>"
        for index, (name, given) in enumerate(found)
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


def harmony(found: list) -> str:
    return "".join(
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json"
        f"<|message|>{json.dumps(given)}<|call|>"
        for name, given in found
    )


WRITE = {
    "gpt_oss": harmony,
    "hermes": hermes,
    "deepseek_v3": lambda found: deepseek(found, "function<｜tool▁sep｜>{}\n```json\n{}\n```"),
    "deepseek_v31": lambda found: deepseek(found, "{}<｜tool▁sep｜>{}"),
    "deepseek_v32": deepseek_v32,
    "kimi_k2": kimi,
    "mistral": lambda found: (
        "[TOOL_CALLS]"
        + json.dumps([{"name": name, "arguments": given} for name, given in found])
    ),
    "minimax_m2": lambda found: (
        "<minimax:tool_call>\n"
        + tagged(found, '<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n",
                 "</invoke>\n")
        + "</minimax:tool_call>"
    ),
    "glm45": lambda found: tagged(
        found, "<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n",
        "</tool_call>\n",
    ),
    "qwen3_coder": lambda found: tagged(
        found, "<tool_call>\n<function={}>\n", "<parameter={}>\n", "\n</parameter>\n",
        "</function>\n</tool_call>\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("parser", FORMS)
@settings(max_examples=40)
@random_seeds
def test_calls_come_back_and_cut_ones_stay_text(parser, seed):
    choose = random.Random(f"{parser}{seed}")
    found, said = calls(choose), text(choose) if choose.random() < 0.7 else ""
    written = WRITE[parser](found).strip()
    expected = tuple(
        ToolCall(
            name,
            json.dumps(given, ensure_ascii=False),
            f"functions.{name}:{index}" if parser == "kimi_k2" else "",
        )
        for index, (name, given) in enumerate(found)
    )
    whole = f"{said}\n\n{written}" if said else written
    assert split_tool_calls(parser, whole, TOOLS) == (said, expected)
    assert split_tool_calls(parser, said, TOOLS) == (said, ())

    cut = whole[: choose.randrange(len(said) + 1, len(whole))] if said else whole[:-9]
    kept, early = split_tool_calls(parser, cut, TOOLS)
    assert early == expected[: len(early)]
    if not early:
        assert kept == cut


MALFORMED = {
    "gpt_oss": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{'a'<|call|>",
    "hermes": '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{{"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": "<｜DSML｜function_calls><｜DSML｜invoke>x</｜DSML｜function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|>f<|tool_calls_section_end|>",
    "mistral": '[TOOL_CALLS][{"name": 5, "arguments": {}}]',
    "minimax_m2": '<minimax:tool_call><invoke name="f">text</invoke></minimax:tool_call>',
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n</tool_call>",
    "qwen3_coder": "<tool_call><function=f><parameter=>1</parameter></function></tool_call>",
}


@pytest.mark.parametrize("parser", FORMS)
def test_a_malformed_call_stays_text_beside_a_good_one(parser):
    bad = f"before {MALFORMED[parser]}"
    assert split_tool_calls(parser, bad, TOOLS) == (bad, ())
    good = WRITE[parser]([("get_weather", {"city": "Bern"})])
    kept, found = split_tool_calls(parser, f"{bad}{good}", TOOLS)
    assert kept.startswith(bad)
    assert [one.name for one in found] == ["get_weather"]


def test_mistral_names_before_arguments():
    written = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}'
    found = (ToolCall("f", '{"a": 1}'), ToolCall("g", "{}", "x1"))
    assert split_tool_calls("mistral", written) == ("", found)


PARAMETERS = {
    "type": "object",
    "properties": {
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "zip": {"oneOf": [{"type": "string"}, {"type": "null"}]},
        "year": {"type": ["string", "null"]},
        "size": {"$ref": "#/$defs/Size"},
        "loop": {"$ref": "#/properties/loop"},
        "away": {"$ref": "https://example.com/x"},
        "grade": {"enum": ["7", None]},
        "both": {"enum": [7, "8"]},
        "level": {"const": "1"},
        "count": {"allOf": [{"type": "integer"}, {"minimum": 0}]},
        "either": {"type": ["string", "integer"]},
        "old": {"type": "string", "nullable": True},
        "tags": {"type": "array"},
        "free": {"description": "anything"},
    },
    "$defs": {"Size": {"$ref": "#/$defs/Text"}, "Text": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("flag", "True", True), ("flag", "false", False), ("flag", "maybe", "maybe"),
        ("maybe", "None", None), ("maybe", "null", None), ("maybe", "False", False),
        ("zip", "01234", "01234"), ("zip", "12345", "12345"), ("zip", "null", None),
        ("year", "2026", "2026"), ("year", "None", None), ("size", "10", "10"),
        ("loop", "1", 1), ("away", "1", 1), ("grade", "7", "7"), ("grade", "null", None),
        ("both", "7", 7), ("both", "8", "8"), ("level", "1", "1"), ("count", "3", 3),
        ("count", "3.0", 3.0), ("either", "5", 5), ("either", "True", "True"),
        ("old", "null", None), ("old", "5", "5"), ("tags", '["a"]', ["a"]), ("free", "5", 5),
        ("free", "x", "x"), ("unknown", "None", None),
    ],
)  # fmt: skip
def test_values_without_types_are_those_of_the_schema(name, written, value):
    tools = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
    whole = f"<tool_call>f\n<arg_key>{name}</arg_key>\n<arg_value>{written}</arg_value></tool_call>"
    _, (call,) = split_tool_calls("glm45", whole, tools)
    assert repr(json.loads(call.arguments)) == repr({name: value})


def test_parameters_may_be_behind_a_reference():
    parameters = {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"q": {"type": "string"}}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    whole = "<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>5</arg_value></tool_call>"
    _, (call,) = split_tool_calls("glm45", whole, tools)
    assert json.loads(call.arguments) == {"q": "5"}


def test_unions_that_name_each_other_are_read_once():
    each = {f"T{i}": {"anyOf": [{"$ref": f"#/$defs/T{j}"} for j in range(40)]} for i in range(40)}
    parameters = {"properties": {"q": {"$ref": "#/$defs/T0"}}, "$defs": each}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    whole = "<tool_call>f\n<arg_key>q</arg_key>\n<arg_value>5</arg_value></tool_call>"
    _, (call,) = split_tool_calls("glm45", whole, tools)
    assert json.loads(call.arguments) == {"q": 5}


FRAMES = {
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v32": ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "minimax_m2": ("<minimax:tool_call>\n", "</minimax:tool_call>"),
    "qwen3_coder": ("<tool_call>\n", "</tool_call>\n"),
}


@pytest.mark.parametrize("left_out", ["begin", "end", "both"])
@pytest.mark.parametrize("parser", FRAMES)
def test_calls_whose_frame_is_left_out_count_if_the_row_has_the_tool(parser, left_out):
    begin, end = FRAMES[parser]
    whole = WRITE[parser]([("get_weather", {"city": "Bern"}), ("a.b_2", {})])
    if left_out != "end":
        whole = whole.replace(begin, "")
    if left_out != "begin":
        whole = whole.replace(end, "")
    kept, found = split_tool_calls(parser, f"I look.\n\n{whole}", TOOLS)
    assert (kept, [one.name for one in found]) == ("I look.", ["get_weather", "a.b_2"])
    assert json.loads(found[0].arguments) == {"city": "Bern"}
    others = [{"type": "function", "function": {"name": "other"}}]
    if left_out == "both":
        assert split_tool_calls(parser, whole, others) == (whole, ())


def test_json_alone_or_without_an_end_counts_if_the_row_has_the_tool():
    call = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
    expected = (ToolCall("get_weather", '{"city": "Bern"}'),)
    assert split_tool_calls("hermes", call, TOOLS) == ("", expected)
    assert split_tool_calls("hermes", f"a <tool_call>\n{call}", TOOLS) == ("a", expected)
    assert split_tool_calls("mistral", f"[{call}]", TOOLS) == ("", expected)
    for text in (f"It is {call}", '{"name": "Bern", "parameters": {}}', '["a"]', "{"):
        assert split_tool_calls("hermes", text, TOOLS) == (text, ())


def test_a_mark_that_is_only_spoken_of_hides_no_call():
    good = WRITE["hermes"]([("get_weather", {})])
    kept, found = split_tool_calls("hermes", f"I write <tool_call> now.\n{good}", TOOLS)
    assert kept == "I write <tool_call> now."
    assert [one.name for one in found] == ["get_weather"]
    inside = WRITE["hermes"]([("get_weather", {"city": "<tool_call>"})])
    _, (call,) = split_tool_calls("hermes", inside, TOOLS)
    assert json.loads(call.arguments) == {"city": "<tool_call>"}


@pytest.mark.parametrize(
    ("parser", "form"),
    [("hermes", "<tool_call>{}</tool_call>"), ("mistral", "[TOOL_CALLS][{}]")],
)
def test_absent_arguments_are_none(parser, form):
    for call in ('{"name": "f"}', '{"name": "f", "arguments": null}'):
        whole = form.format(call)
        assert split_tool_calls(parser, whole) == ("", (ToolCall("f", "{}"),))


def test_harmony_role_with_a_recipient():
    written = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
    for whole in (written, "<|start|>assistant" + written + "<|call|>"):
        reasoning, rest = split_reasoning(HARMONY, whole)
        assert (reasoning, *split_tool_calls("gpt_oss", rest)) == (
            None, "", (ToolCall("f", '{"a": 1}'),)
        )  # fmt: skip


@pytest.mark.parametrize("parser", REASONING_PARSERS)
@settings(max_examples=40)
@random_seeds
def test_parts_come_back(parser, seed):
    choose = random.Random(f"{parser}{seed}")
    thought, said = text(choose), text(choose)
    opened = seed % 2 == 0
    if parser == HARMONY:
        start, end = "<|channel|>analysis<|message|>", "<|end|>"
        answer = f"<|start|>assistant<|channel|>final<|message|>{said}"
        opened, marks = False, (start, end, answer.removesuffix(said))
    else:
        markers = MARKERS[parser]
        start, end = f"{markers.begin}\n", f"\n{markers.end}"
        answer = f"\n\n{said}"
        if markers.answer is not None:
            answer = "\n{1}\n{0}\n{2}".format(said, *markers.answer)
        marks = (markers.begin, markers.end, *(markers.answer or ()))
    written = ("" if opened else start) + thought + end + answer
    is_open = True if opened else None
    assert split_reasoning(parser, written, is_open=is_open) == (thought, said)
    unfinished = ("" if opened else start) + thought
    assert split_reasoning(parser, unfinished, is_open=is_open) == (thought, "")
    # Wherever the text is cut, nothing but markers is missing.
    begun = written[: choose.randrange(len(written))]
    parts = split_reasoning(parser, begun, is_open=is_open)
    kept = "".join("".join(part or "" for part in parts).split())
    for mark in marks:
        begun = begun.replace(mark, "")
    assert kept == "".join(begun.split())


@pytest.mark.parametrize(
    ("is_open", "written", "parts"),
    [
        (None, "plain", (None, "plain")),
        (None, "a</think>b", ("a", "b")),
        (None, "Write <think>a</think> in it", (None, "Write <think>a</think> in it")),
        (None, "\n<think></think>\n\nb", ("", "b")),
        (None, "<think>a</think>b</think>c", ("a", "b</think>c")),
        (True, "a", ("a", "")),
        (True, "<think>a</think>b", ("a", "b")),
        (True, "a</think>", ("a", "")),
        (False, "a</think>b", (None, "a</think>b")),
        (False, " b\n", (None, " b\n")),
    ],
)
def test_markers_in_odd_places(is_open, written, parts):
    assert split_reasoning("think", written, is_open=is_open) == parts


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        ("plain", (None, "plain")),
        ("<|channel|>final<|message|>b<|return|>", (None, "b")),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b",
            ("a\nb", ""),
        ),
        (
            "<|channel|>commentary<|message|>I will look.<|end|><|start|>assistant<|channel|>final"
            "<|message|>b",
            (None, "I will look.\nb"),
        ),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assist", ("a", "<|start|>assist")),
        ("<|channel|>fin", (None, "<|channel|>fin")),
    ],
)
def test_channels(written, parts):
    assert split_reasoning(HARMONY, written) == parts


@pytest.mark.parametrize(
    ("prompt", "continued", "expected"),
    [
        ("assistant\n<think>\n", "", True),
        ("<|Assistant|></think>", "", False),
        ("assistant\n<think>\n\n</think>\n\n", "", False),
        ("assistant\n", "", None),
        ("user: <think> in my words\nassistant\n", "", None),
        ("assistant\n<think>\nso far", "<think>\nso far", True),
        ("assistant\n<think>a</think>so", "<think>a</think>so", False),
        ("assistant\nso", "so", None),
    ],
)
def test_the_prompt_says_where_the_text_begins(prompt, continued, expected):
    assert opens_reasoning("think", prompt, continued) is expected
    assert opens_reasoning(HARMONY, prompt, continued) is None


@pytest.mark.parametrize(
    ("template", "reasoning", "tools"),
    [
        ("{{ messages }}", None, None),
        ("<tool_call> </think>", "think", "hermes"),
        ("<tool_call><function=x> </think>", "think", "qwen3_coder"),
        ("<tool_call><arg_key> </think>", "think", "glm45"),
        ("<minimax:tool_call> '</think>'", "think", "minimax_m2"),
        ("<｜tool▁calls▁begin｜>", None, "deepseek_v31"),
        ("<｜tool▁calls▁begin｜> ```json </think>", "think", "deepseek_v3"),
        ("<|channel|>analysis<|message|> to=functions.", HARMONY, "gpt_oss"),
        ("[THINK] [/THINK] [TOOL_CALLS]", "mistral", "mistral"),
        ("<think></think><answer></answer>", "hunyuan", None),
        ("<seed:think></seed:think>", "seed_oss", None),
    ],
)
def test_parsers_are_found_from_the_template(template, reasoning, tools):
    assert find_reasoning_parser(template) == reasoning
    assert shortest_name(reasoning or "none", template) == "auto"
    assert shortest_name("other", template) == "other"
    assert find_tool_call_parser(template) == tools


def test_an_unknown_parser_is_refused():
    for name in ("auto", "none"):
        check_reasoning_parser(name)
        check_tool_call_parser(name)
    with pytest.raises(ConfigError, match=r"reasoning_parser is 'x'; it takes one of auto, none"):
        check_reasoning_parser("x")
    with pytest.raises(ConfigError, match="tool_call_parser is 'x'"):
        check_tool_call_parser("x")


def test_arguments_with_a_lone_surrogate_keep_its_escape():
    text = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800", "b": "\\u00e9"}}</tool_call>'
    _, (call,) = split_tool_calls("hermes", text, TOOLS)
    assert call.arguments.encode().isascii()
    assert json.loads(call.arguments) == {"a": "\ud800", "b": "é"}


def test_a_name_with_a_lone_surrogate_is_no_call():
    text = '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'
    assert split_tool_calls("hermes", text, TOOLS) == (text, ())


NUM_CHARACTERS, GROWTH = 25_000, 4
QUICK_S = 0.005  # below it, times say nothing
MARK = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|\w+|\s+|[^\w\s]")


def hostile_answers(written: str, num_characters: int) -> Iterator[str]:
    """Texts of marks that are repeated, or begun and never ended."""
    marks = MARK.findall(written)
    begins = ["".join(marks[:count]) for count in range(1, len(marks))]
    for part in dict.fromkeys([*marks, *begins, written]):
        yield part * (num_characters // len(part))
    for begin in begins:
        yield begin + " " * num_characters
        yield begin + "[" * num_characters


def assert_one_pass(
    work: Callable[[str], object], make: Callable[[int], Iterable[str]], every: int = 1
) -> None:
    """A text four times as long takes about four times as long; in quadratic time, 16 times.

    The machine may be busy, so one of three comparisons has to hold. Every one of `every` texts is
    looked at.
    """

    def seconds(text: str) -> float:
        begin = time.process_time()
        work(text)
        return time.process_time() - begin

    sizes = (NUM_CHARACTERS, GROWTH * NUM_CHARACTERS)
    for short, long in list(zip(*map(make, sizes), strict=True))[::every]:
        times = ((seconds(short), seconds(long)) for _ in range(3))
        is_quick = (after < 2 * GROWTH * max(before, QUICK_S) for before, after in times)
        assert any(is_quick), long[:200]


@pytest.mark.parametrize("parser", ["qwen3_coder", "minimax_m2"])
def test_end_tags_of_parameters_may_be_left_out(parser):
    """What looks like a tag without the name of a parameter is text."""
    values = {"free": "a <parameter=x> b", "tags": [1], "count": 2}
    written = WRITE[parser]([("f", values)])
    tools = [{"function": {"name": "f", "parameters": PARAMETERS}}]
    for text in (written, re.sub("</parameter>\n?", "", written)):
        kept, (call,) = split_tool_calls(parser, text, tools)
        assert (kept, json.loads(call.arguments)) == ("", values)


@pytest.mark.parametrize("parser", FORMS)
def test_hostile_answers_are_read_in_one_pass(parser):
    written = WRITE[parser]([("f", {"city": "x"})])
    assert_one_pass(
        lambda one: split_tool_calls(parser, one, TOOLS),
        functools.partial(hostile_answers, written),
        every=len(list(hostile_answers(written, len(written)))) // 12,
    )


@pytest.mark.slow
@pytest.mark.parametrize("parser", FORMS)
def test_all_hostile_answers_are_read_in_one_pass(parser):
    def many(num_characters: int) -> Iterator[str]:
        calls = WRITE[parser]([("f", {})] * 1000) * (num_characters // 1000)
        yield from (calls, calls[:-3])

    written = WRITE[parser]([("f", {"city": "x"}), ("g", {})])
    for make in (functools.partial(hostile_answers, written), many):
        assert_one_pass(lambda one: split_tool_calls(parser, one, TOOLS), make)


@pytest.mark.parametrize("parser", REASONING_PARSERS)
def test_hostile_reasoning_is_split_in_one_pass(parser):
    marks = ["<|start|>", "assistant", "<|channel|>", "analysis", "<|message|>", "a", "<|end|>"]
    if parser != HARMONY:
        markers = MARKERS[parser]
        marks = [markers.begin, "a", markers.end, *(markers.answer or ())]
    make = functools.partial(hostile_answers, "".join(marks))
    assert_one_pass(lambda one: split_reasoning(parser, one), make)


def test_thousands_of_calls_are_calls():
    whole = WRITE["hermes"]([("f", {})]) * 20_000
    kept, found = split_tool_calls("hermes", whole, TOOLS)
    assert (kept, len(found)) == ("", 20_000)
