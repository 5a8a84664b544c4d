"""Values of a vocabulary that mean the same in different forms."""

import pyarrow as pa
import pytest

from jaxrank.data.statistics.report import forms_line
from jaxrank.data.statistics.vocabulary import find_two_forms


@pytest.mark.parametrize(
    "forms",
    [
        *(["36", "36.0"], ["36.", "36"], ["1,234", "1234"], ["1,234,567.0", "1234567"]),
        *(["007", "7"], ["+5", "5"], ["-0", "-0.0"], ["a", " a"], ["a", "a\u00a0"]),
        *(
            ["\ufeffa", "a"],
            ["caf\u00e9", "cafe\u0301"],
            [" 36.0", "36"],
            ["'a'", "a"],
            ["a", '"a"'],
        ),
    ],
)
def test_values_in_two_forms_are_found(forms):
    values = pa.array(["x", *forms[:1], "12", "y", *forms[1:], "37"])
    assert find_two_forms(values) == (2, forms)
    assert find_two_forms(pa.chunked_array([values.slice(0, 3), values.slice(3)])) == (2, forms)


@pytest.mark.parametrize(
    "values",
    [
        *([], ["a"], ["36", "360", "3.6"], ["36.5", "36"], ["1,23", "123"], ["12,345", "12.345"]),
        *(["a", "A"], ["-5", "5"], ["a b", "ab"], ["1e5", "100000"], ["0x10", "16"], ["'", "''"]),
    ],
)
def test_different_values_are_no_forms_of_each_other(values):
    assert find_two_forms(pa.array(values, pa.string())) is None
    assert forms_line("table c", pa.array(values, pa.string())) == ""
