"""Calls of every family: what a template renders is parsed, and goes back into the next turn."""

# ruff: noqa: RUF001 - marks of DeepSeek

import json
import re

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import given, settings

from raymoe.chat.parser import ChatParser
from raymoe.chat.tool_calls import FORMS, find_tool_call_parser, split_tool_calls
from raymoe.config import SamplingParams
from raymoe.data.columns import OutputColumns
from raymoe.engine.outputs import Generation
from raymoe.engine.tokenizer import check_messages
from raymoe.engine.workers import chat_worker
from raymoe.openai.batch import write_responses

WORDS = {
    "CALLS(": "{% if m.tool_calls %}",
    ")CALLS": "{% endif %}",
    "CALL(": "{% for c in m.tool_calls or [] %}",
    ")CALL": "{% endfor %}",
    "ITEM(": "{% for k, v in c.function.arguments | items %}",
    ")ITEM": "{% endfor %}",
    "NAME": "{{ c.function.name }}",
    "ID9": "{{ c.id if c.id | length == 9 else raise_exception(c.id) }}",
    "ID": "{{ c.id if ':' in c.id else raise_exception(c.id) }}",
    "JSON": "{{ c.function.arguments | tojson }}",
    "OBJECT": "{{ c.function | tojson }}",
    "KEY": "{{ k }}",
    "VALUE": "{{ v if v is string else v | tojson }}",
    "PYTHON": "{{ v if v is string else v | tojson if v is iterable else v | string }}",
    "IS_TEXT": "{{ 'true' if v is string else 'false' }}",
    "¶": "{{ '\\n' }}",
}


def dsml(block):
    form = (
        'CALLS(<D%>¶CALL(<Dinvoke name="NAME">¶ITEM(<Dparameter name="KEY" string="IS_TEXT">VALUE'
        "</Dparameter>¶)ITEM</Dinvoke>¶)CALL</D%>)CALLS"
    )
    return form.replace("%", block).replace("<D", "<｜DSML｜").replace("</D", "</｜DSML｜")


def deepseek(form):
    call = f"<｜tool▁call▁begin｜>{form}<｜tool▁call▁end｜>"
    return f"CALLS(<｜tool▁calls▁begin｜>CALL({call})CALL<｜tool▁calls▁end｜>)CALLS"


# How the families' own templates write calls, and the parsers that read them.
FAMILIES = {
    "DeepSeek-V3": ("deepseek_v3", deepseek("function<｜tool▁sep｜>NAME¶```json¶JSON¶```")),
    "DeepSeek-V3.1": ("deepseek_v31", deepseek("NAME<｜tool▁sep｜>JSON")),
    "DeepSeek-V3.2": ("deepseek_v32", dsml("function_calls")),
    "DeepSeek-V4": ("deepseek_v32", dsml("tool_calls")),
    "GLM-4.5": (
        "glm45",
        "CALL(<tool_call>NAME¶ITEM(<arg_key>KEY</arg_key>¶<arg_value>VALUE</arg_value>¶)ITEM"
        "</tool_call>)CALL",
    ),
    "gpt-oss": (
        "gpt_oss",
        "CALL(<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>JSON"
        "<|call|>)CALL",
    ),
    "Hermes": ("hermes", "CALL(<tool_call>¶OBJECT¶</tool_call>¶)CALL"),
    "Kimi-K2": (
        "kimi_k2",
        "CALLS(<|tool_calls_section_begin|>CALL(<|tool_call_begin|>ID<|tool_call_argument_begin|>"
        "JSON<|tool_call_end|>)CALL<|tool_calls_section_end|>)CALLS",
    ),
    "MiniMax-M2": (
        "minimax_m2",
        'CALLS(<minimax:tool_call>¶CALL(<invoke name="NAME">¶ITEM(<parameter name="KEY">VALUE'
        "</parameter>¶)ITEM</invoke>¶)CALL</minimax:tool_call>)CALLS",
    ),
    "Mistral": (
        "mistral",
        'CALLS([TOOL_CALLS] [CALL({{ ", " if not loop.first }}'
        '{"name": "NAME", "arguments": JSON, "id": "ID9"})CALL])CALLS',
    ),
    "Mistral-3": ("mistral", "CALL([TOOL_CALLS]NAME[CALL_ID]ID9[ARGS]JSON)CALL"),
    "Qwen3-Coder": (
        "qwen3_coder",
        "CALL(<tool_call>¶<function=NAME>¶ITEM(<parameter=KEY>¶PYTHON¶</parameter>¶)ITEM</function>¶"
        "</tool_call>)CALL",
    ),
}
HEAD = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
TURN = "«{{ m.role }}»{{ m.content or '' }}"
RESULT = "{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}"


def template(family):
    form = re.sub(
        r"\)?\b(CALLS?|ITEM)\b\(?|\b[A-Z_]+9?\b|¶",
        lambda one: WORDS.get(one[0], one[0]),
        FAMILIES[family][1],
    )
    marks = "{# to=functions. #}" if family == "gpt-oss" else ""
    loop = f"{{% for m in messages %}}{TURN}{form}{RESULT}{{% endfor %}}"
    return HEAD + marks + loop + "{% if add_generation_prompt %}«now»{% endif %}"


PROPERTIES = {
    "text": {"type": "string"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "grade": {"enum": ["7", "8", None]},
    "count": {"$ref": "#/$defs/Count"},
    "flag": {"type": ["boolean", "null"]},
    "ratio": {"type": "number"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "more": {"type": "object"},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "$defs": {"Count": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}}
    for name in ("find", "get-all_2")
]
# No marks of families, which no form escapes, and no line ends where a value ends.
TEXT = st.text("aé語 \n{}[]\"'&:,.17/\\🙂", max_size=12).map(str.strip)
VALUES = {
    "text": st.one_of(TEXT, st.sampled_from(["true", "null", "12", "1.5", '{"a": 1}'])),
    "maybe": st.one_of(st.none(), st.sampled_from(["12", "true", "a\n\nb", "None of it"])),
    "grade": st.sampled_from(["7", "8", None]),
    "count": st.integers(-(10**18), 10**18),
    "flag": st.sampled_from([True, False, None]),
    "ratio": st.floats(allow_nan=False, allow_infinity=False),
    "tags": st.lists(TEXT, max_size=3),
    "more": st.dictionaries(TEXT, st.one_of(TEXT, st.none(), st.integers(), st.lists(TEXT))),
}
CALLS = st.lists(
    st.tuples(st.sampled_from(["find", "get-all_2"]), st.fixed_dictionaries({}, optional=VALUES)),
    min_size=1,
    max_size=3,
)
ASKED = [{"role": "user", "content": "hi"}]


def render(family, messages):
    request = {
        "messages": check_messages(messages), "tools": TOOLS, "variables": {},
        "add_generation_prompt": messages[-1]["role"] != "assistant",
        "continue_final_message": False,
    }  # fmt: skip
    return chat_worker.render(template(family), request, 100_000)


def calling(family, calls):
    """A message with calls of these names and arguments, with ids as the family has them."""
    name_id = "functions.{0}:{1}" if family == "Kimi-K2" else "abcdefg{1:02d}"
    return {"role": "assistant", "content": "", "tool_calls": [
        {"id": name_id.format(name, i), "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]}  # fmt: skip


def said(family, calls):
    """What the template writes for a message with these calls."""
    return render(family, [*ASKED, calling(family, calls)]).partition("«assistant»")[2]


def read(family, text):
    kept, calls = split_tool_calls(FAMILIES[family][0], text, TOOLS)
    return kept, [(call.name, json.loads(call.arguments)) for call in calls]


def answer(family, text):
    """The message of a batch file's output for this answer of a model."""
    parser = ChatParser(tool_calls=FAMILIES[family][0])
    kept, calls = split_tool_calls(FAMILIES[family][0], text, TOOLS)
    columns = OutputColumns.of(SamplingParams(), has_choices=True, parser=parser)
    table = pa.table({"custom_id": ["a"], "url": ["/v1/chat/completions"], "model": ["m"]})
    made = columns.append(table, [Generation(text=kept, tool_calls=calls)])[0]
    (response,) = write_responses(made)
    return response["response"]["body"]["choices"][0]["message"]


def check_render(family, calls):
    assert find_tool_call_parser(template(family)) == FAMILIES[family][0]
    text = said(family, calls)
    for name, arguments in calls:
        assert name in text
        assert all(key in text for key in arguments)


def check_parse(family, calls):
    assert read(family, said(family, calls)) == ("", calls)


def check_second_turn(family, calls):
    message = answer(family, said(family, calls))
    ids = [call["id"] for call in message["tool_calls"]]
    own = {"Kimi-K2", "Mistral", "Mistral-3"}  # whose models write ids
    if family in own:
        assert ids == [call["id"] for call in calling(family, calls)["tool_calls"]]
    else:
        assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in ids)
        assert len({*ids}) == len(ids)
    results = [{"role": "tool", "tool_call_id": one, "content": "ok"} for one in ids]
    prompt = render(family, [*ASKED, message, *results])
    assert prompt.endswith("«now»")
    assert all(f"«tool»ok{one}" in prompt for one in ids)
    again = prompt.partition("«assistant»")[2].partition("«tool»")[0]
    assert read(family, again) == ("", calls)


EXAMPLE = [
    ("find", {"text": "12", "maybe": None, "flag": True, "tags": ["a\nb"], "grade": "7"}),
    ("get-all_2", {}),
]
STEPS = {"render": check_render, "parse": check_parse, "second turn": check_second_turn}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_tools(family, step):
    STEPS[step](family, EXAMPLE)


def test_every_parser_has_a_family():
    assert {parser for parser, _ in FAMILIES.values()} == {*FORMS}


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(calls=CALLS)
def test_any_calls_of_families_with_tools(family, step, calls):
    STEPS[step](family, calls)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}])
def test_calls_without_arguments_are_rendered_as_calls_with_none(family, arguments):
    message = calling(family, [("find", {})])
    expected = render(family, [*ASKED, message])
    message["tool_calls"][0]["function"] = {"name": "find"} | arguments
    assert render(family, [*ASKED, message]) == expected
