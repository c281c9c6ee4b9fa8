"""What is cached, and where: pages, tables and lengths, as kernels take them.

Legend: N sequences, C latent width, R shared key channels, P pages of S rows, W pages a sequence
may have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BOX = 64
"""Rows and channels that the copy engine fetches at a time."""
BOXED_CHANNELS = (512, 64)
"""C and R of rows that can come in boxes."""


class Rows(NamedTuple):
    c_PSC: Tensor
    r_PSR: Tensor
    rate_PS: Tensor | None
    """What each row of `c_PSC` was divided by, where that is fp8."""
    table_NW: Tensor
    length_N: Tensor

    @property
    def page(self) -> int:
        """As the kernels take it: 0 where a sequence has one page."""
        return 0 if self.table_NW.shape[1] == 1 else self.c_PSC.shape[1]

    @property
    def capacity(self) -> int:
        return self.table_NW.shape[1] * self.c_PSC.shape[1]

    @property
    def come_in_boxes(self) -> bool:
        """Whether the copy engine can fetch them as K3's bf16 rows in one array: shared channels
        lie behind the latent's, pages follow each other like rows do, no box crosses a page, and
        rows are aligned."""
        c_PSC, r_PSR = self.c_PSC, self.r_PSR
        known = c_PSC.dtype == torch.bfloat16 and self.rate_PS is None
        sizes = (c_PSC.shape[2], r_PSR.shape[2]) == BOXED_CHANNELS
        behind = r_PSR.data_ptr() - c_PSC.data_ptr() == c_PSC.shape[2] * c_PSC.itemsize
        together = c_PSC.stride() == r_PSR.stride() and behind
        page_stride, row_stride, _ = c_PSC.stride()
        rows_on = len(c_PSC) == 1 or page_stride == c_PSC.shape[1] * row_stride
        aligned = c_PSC.data_ptr() % 16 == 0 and row_stride * c_PSC.itemsize % 16 == 0
        return known and sizes and together and rows_on and aligned and self.page % BOX == 0
