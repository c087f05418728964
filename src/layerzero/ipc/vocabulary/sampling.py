"""What all processes know of sampling: which values its settings may have, and the arithmetic by which every kernel
that claims so draws the same tokens. docs/ops.md has the formulas and their reasons.

Logits become weights, integers below 2^53 whose sums float64 holds exactly, in whatever order they are added. The
exponential between is made of multiplications and additions alone, which IEEE 754 rounds in one way only.
"""

from __future__ import annotations

import math

# Of the exponential of y <= 0: the Taylor series of y / 2^10 by Horner's rule, squared ten times.
COEFFICIENTS = tuple(1 / math.factorial(n) for n in range(7, -1, -1))  # relative error of the whole: below 3e-13
HALVINGS = 10
LEAST = -64.0  # what lies below counts as this: its weight is 0

# Of numbers that float32 rounds to a finite one, and to one above 0: halfway to the next counts as the even one.
MOST = math.nextafter((2 - 2.0**-24) * 2.0**127, 0)
ABOVE_0 = math.nextafter(2.0**-150, 1)

# Least and most of each setting, and what is allowed in words.
LIMITS: dict[str, tuple[float, float, str]] = {
    "repetition_penalty": (ABOVE_0, MOST, "a finite number above 0; 1 does nothing"),
    "presence_penalty": (-MOST, MOST, "a finite number; 0 does nothing"),
    "frequency_penalty": (-MOST, MOST, "a finite number; 0 does nothing"),
    "temperature": (0.0, MOST, "a finite number from 0 on; 0 takes the largest logit"),
    "top_k": (0, 2**63 - 1, "an integer from 0 on; 0 keeps all"),
    "top_p": (0.0, 1.0, "0 to 1; 1 keeps all"),
    "min_p": (0.0, 1.0, "0 to 1; 0 keeps all"),
}
_OF_FILTER = (ABOVE_0, MOST, "a finite number above 0")  # temperature, where no token is drawn


def problem(op: str, name: str, value: float) -> str:
    """What is wrong with a value of a setting, as what is allowed; "" where nothing is."""
    least, most, allowed = _OF_FILTER if (op, name) == ("filter_logits", "temperature") else LIMITS[name]
    return "" if least <= value <= most else allowed  # for NaN, too


def weight_bits(vocabulary: int) -> int:
    """The largest weight of so many tokens is 2 to this: the sum of all stays below 2^53."""
    return 52 - (vocabulary - 1).bit_length()


def exponential(y: float) -> float:
    """exp(y) for y <= 0, the same on every machine; 1 for 0."""
    z = max(y, LEAST) * 2.0**-HALVINGS
    power = COEFFICIENTS[0]
    for coefficient in COEFFICIENTS[1:]:
        power = power * z + coefficient
    for _ in range(HALVINGS):
        power = power * power
    return power
