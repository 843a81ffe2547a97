"""Simulated GPUs, for tests of placement: actors are placed on them but compute on the CPU."""

from __future__ import annotations

import os

from rayfed.errors import UserError

VARIABLE = "RAYFED_SIMULATED_GPUS"
"""Environment variable with the number of GPUs to simulate."""


def simulated_gpus() -> int:
    """Return the number of simulated GPUs; 0 if no GPUs are simulated."""
    value = os.environ.get(VARIABLE, "0")
    if not value.isdecimal():
        raise UserError(f"{VARIABLE}: found '{value}'; give a number of GPUs, such as 2, or unset it")
    return int(value)
