"""Says in the words of JSON Schema and raymoe why llguidance refuses a constraint.

Its own messages name its options, its types and places in text that is not the user's.
"""

import re

from raymoe.structured import StructuredOutputs

_TYPES = "null, boolean, integer, number, string, array, object"
_SCHEMA = (
    (
        r"oneOf constraints are not supported.*",
        "it has a oneOf with alternatives that may hold at once; write anyOf, or give each "
        "alternative another type or another const of a required property",
    ),
    (
        r"min/maxProperties only supported.*",
        "it has minProperties or maxProperties beside properties that may be absent; require them "
        "all, or leave it out and check the answers",
    ),
    (
        r"circular references with sibling keys .*?(#\S*)",
        r"it has a $ref to \1 that leads back to itself with other keywords beside it; move them "
        "into what it leads to",
    ),
    (
        r"(?:can't determine if )?patternProperty regexes (.*) are (?:not )?disjoint",
        r"it has patternProperties \1 that may match one name; write patterns that exclude others",
    ),
    (r"Expected f64 for '?([\w ]+?)'?, got (.*)", r"it has \1 \2; it takes a number"),
    (
        r"Expected positive integer for '(\w+)', got (.*)",
        r"it has \1 \2; it takes a whole number from 0",
    ),
    (r"Expected string for '(\w+)'(?: item)?, got (.*)", r"it has \1 \2; it takes text"),
    (r"Expected array for '(\w+)', got (.*)", r"it has \1 \2; it takes a list"),
    (r"Expected object for '(\w+)', got (.*)", r"it has \1 \2; it takes an object"),
    (r"(enum|allOf|anyOf|oneOf|prefixItems) must be an array", r"it has \1 that is no list"),
    (r"properties must be an object", "it has properties that are no object"),
    (r"type must be .*", f"it has a type that is no name or list of {_TYPES}"),
    (r"Invalid type: (.*)", rf"it has type \1; known are {_TYPES}"),
    (
        r"schema must be an object or boolean",
        "it has a part that is neither an object nor true or false",
    ),
    (r"invalid multiple of", "it has multipleOf 0; it takes more than 0"),
    (r"Value for 'multipleOf' has too many digits: (.*)", r"it has multipleOf \1, too many digits"),
    (r"schema too large", "it is too large; divide or simplify it"),
    (r"Schema intersection stack level exceeded", "it joins too many schemas; simplify it"),
    (
        r"Unsatisfiable schema: Regex is empty.*",
        "it allows no text: pattern, format and lengths of one string exclude each other",
    ),
    (
        r"Unable to determine if regex is empty.*",
        "it has a string whose pattern, format and lengths are too complex; simplify them",
    ),
    (
        r"Unsatisfiable schema: \w*[mM]inimum .* \w*[mM]aximum .*",
        "it allows no number: its bounds exclude each other",
    ),
    (r"Unsatisfiable schema: schema is false", "it has false where a value is required"),
    (r"Unsatisfiable schema: (.*)", r"it allows no JSON: \1"),
)
_REGEX = (
    (
        r"(?:.*: )?lookarounds not supported yet; (?:End|Start) .*",
        "it has ^ or $ within a regex; use them at its ends alone",
    ),
    (
        r".*regex parse error: .* error: (.*?)(?: \d+ \| .*)?",
        r"it has a malformed regex: \1",
    ),
)
_LARK = (
    (
        r"declare statement not supported yet",
        "%declare is not supported; define the terminal instead",
    ),
    (
        r"params not supported yet|template usage not supported yet",
        "rules with parameters are not supported; write one rule for each",
    ),
    (r"priority not supported yet", "priorities are not supported; leave them out"),
    (
        r"& is only supported for tokens.*",
        "& joins terminals alone; write the rule's name in capitals",
    ),
    (r"l-flag is not supported in regexes", "the flag l of a regex is not supported; leave it out"),
    (r"Unknown common regex: ([^;]*);.*", r"\1 cannot be imported; define it instead"),
    (r"no start rule found", "it has no rule start"),
    (r"unknown name: (.*)", r"\1 is not defined"),
    (r"lexer error", "what begins here is not Lark"),
    (r"unknown grammar (.*)", r"\1 is not Lark; name a rule"),
    (r"error parsing (?:un)?signed integer: (.*)", r"\1"),
)
_MATCHING = (
    (
        r"(?:.*: )?Current row has (\d+) items; max is (\d+).*",
        r"the grammar allows \1 readings of the text at once, and at most \2 can be followed: "
        "write lists as left-recursive rules, and only one rule for each text",
    ),
)
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_EXCERPT = re.compile(r" \(at \"| \d+ \| ")  # of the text that llguidance got


def in_our_words(outputs: StructuredOutputs, problem: str) -> str:
    """Return a problem of the worker; it begins by "cannot be" if the text is llguidance's."""
    head, _, text = problem.partition(": ")
    if head == "cannot be matched":
        return f"{head}: {_translated(text, _MATCHING) or text}"
    if head != "cannot be used":
        return problem
    where = ""
    if outputs.grammar is not None and (place := _PLACE.match(text)):
        # What was EBNF has other lines for llguidance.
        text = text[place.end() :]
        where = "" if "::=" in outputs.grammar else f"line {place[1]}, character {place[2]}: "
    ours = _translated(text, (*_SCHEMA, *_REGEX)) or _translated(_EXCERPT.split(text)[0], _LARK)
    return f"{head}: {where}{ours or _EXCERPT.split(text)[0]}"


def _translated(text: str, table: tuple[tuple[str, str], ...]) -> str | None:
    for pattern, ours in table:
        found = re.fullmatch(pattern, text)
        if found:
            return found.expand(ours)
    return None
