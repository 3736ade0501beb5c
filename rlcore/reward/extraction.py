"""Finds the answer in a response; a row names its extraction in `extra_info.extraction`.

reasoning-gym's own scorers compare the whole text and give part of the score for a right answer
in a sentence; so the answer is taken out first.
"""

import re
from collections.abc import Callable

from rlcore.registry import Registry

ANSWER_EXTRACTORS = Registry[Callable[[str], str | None]]("answer extraction")

# A minus directly after a digit is an operator ("15-43" ends in 43), elsewhere a sign.
_NUMBER = re.compile(r"(?<!\d)(?<!\d\.)-?\d+(?:\.\d+)?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@ANSWER_EXTRACTORS.register("last_integer")
def extract_last_integer(response: str) -> str | None:
    """Return the last integer of the response in plain digits, or None.

    `1,204` counts as 1204 and `7.0` as 7; other decimals are passed over.
    """
    text = _THOUSANDS.sub("", response.replace("\N{MINUS SIGN}", "-"))
    for number in reversed(_NUMBER.findall(text)):
        whole, _, fraction = number.partition(".")
        if not fraction.strip("0"):
            return str(int(whole))
    return None


@ANSWER_EXTRACTORS.register("stripped")
def extract_stripped(response: str) -> str | None:
    """Return the response without white space at its ends, or None if nothing is left."""
    return response.strip() or None
