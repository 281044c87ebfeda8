"""Tables of facts in a notebook: escaped, and with figures as people read them."""

import pytest

from slipstream.display import card, shown


@pytest.mark.parametrize(
    "value, text",
    [(3706, "3,706"), (3000.0, "3,000"), (0.52812, "0.5281"), (1.0, "1.0000"), (True, "True")],
)
def test_figures_are_shown_as_people_read_them(value, text):
    assert shown(value) == text


def test_not_a_number_and_infinity_are_shown():
    assert shown(float("nan")) == "nan" and shown(float("inf")) == "inf"


def test_a_card_escapes_its_texts():
    page = card("runs/<a>", {"data": "x & y", "users": 6040})
    assert "runs/&lt;a&gt;" in page and "x &amp; y" in page and "6,040" in page
    assert page.startswith("<table>") and page.endswith("</table>")
