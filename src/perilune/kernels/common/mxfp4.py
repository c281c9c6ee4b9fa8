"""What MXFP4 is: codes of four bits, and a power of two for each group of them.

Source: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

GROUP = 32
"""Neighbouring input columns that share a scale."""
CODE_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the low three bits of a code (E2M1); bit 3 is the sign."""
SCALE_BIAS = 127
"""A scale byte s means 2^(s - 127)."""
NAN_SCALE = 255
"""The byte that means no number."""
