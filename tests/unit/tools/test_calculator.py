import pytest

from rlcore.tools.calculator import calculator


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"), ("(1 + 2) * 3", "9"), ("-7 // 2", "-4"), ("7 % 4", "3"),
        ("0.1 + 0.2", "0.3"), ("1 / 3", "0.3333333333"), ("2 ** 10", "1024"), ("2 ** -1", "0.5"),
        (" 6/3 ", "2"), ("--5", "5"),
    ],
)  # fmt: skip
def test_it_calculates_exactly(expression, value):
    assert calculator(expression=expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1 +", "not an arithmetic"), ("", "not an arithmetic"), ("x + 1", "not an arithmetic"),
        ("__import__('os')", "not an arithmetic"), ("True", "not an arithmetic"),
        ("9 ** 9 ** 9", "exponents"), ("9 ** 60 * 9 ** 60", "digits"), ("1+" * 200, "longer than"),
        ("2 ** 0.5", "exponents"),
    ],
)  # fmt: skip
def test_everything_else_is_refused(expression, message):
    with pytest.raises(ValueError, match=message):
        calculator(expression=expression)
    with pytest.raises(ZeroDivisionError):
        calculator(expression="1 / 0")
