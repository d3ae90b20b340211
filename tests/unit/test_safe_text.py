"""No text from a row can make a terminal do anything, and ordinary text stays as it is."""

import pytest

from raymoe.safe_text import harmless

ATTACKS = {
    "colour and clear": "\x1b[31m\x1b[2J",
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x1b\\",
    "link": "\x1b]8;;http://x\x1b\\click\x1b]8;;\x1b\\",
    "C1 control": "\x9b31m\x9d0;owned\x9c",
    "carriage return": "fine\rbad",
    "backspace": "bad\b\b\bfine",
    "line break": "fine\nerror: no space left",
    "bidirectional": "\u202etxt.exe\u2066\u2069",
    "line separator": "a\u2028b\u2029c",
    "no break space that hides": "\ufeff\u2060",
    "nul and delete": "\x00\x7f",
    "surrogate": "\ud800",
}


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_what_a_terminal_would_obey_becomes_visible(text):
    shown = harmless(text)
    assert shown.isprintable()
    assert shown != text
    assert "\\" in shown


def test_ordinary_text_of_any_language_stays():
    for text in ("plain", "Grüße, 東京", "ना\u200dम", "👩\u200d👩\u200d👧", "a  b", r"C:\temp"):
        assert harmless(text) == text


def test_our_own_line_breaks_stay_when_we_say_so():
    assert harmless("a\n  b\x1b[0m", keep="\n") == "a\n  b\\x1b[0m"
