"""What is cached, and where: pages, tables and lengths, as kernels and the copy engine take them.

Legend: N sequences, C latent width, R shared key channels, P pages of S rows, W pages a sequence
may have.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


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

    def tile_by_tile(self, tokens: int) -> bool:
        """Whether the copy engine can fetch tiles of so many tokens: none crosses a page, pages
        follow each other like rows do, and rows are aligned."""
        x = (self.c_PSC, self.r_PSR)
        rows_on = all(len(y) == 1 or y.stride(0) == y.shape[1] * y.stride(1) for y in x)
        aligned = all(y.data_ptr() % 16 == 0 and y.stride(1) * y.itemsize % 16 == 0 for y in x)
        return self.rate_PS is None and self.page % tokens == 0 and rows_on and aligned

    def are_whole(self, c: int, r: int) -> bool:
        """Whether latents of `c` channels and `r` shared ones behind them make up rows in bf16."""
        together = self.c_PSC.stride() == self.r_PSR.stride()
        behind = self.r_PSR.data_ptr() - self.c_PSC.data_ptr() == c * self.c_PSC.itemsize
        sizes = (self.c_PSC.shape[2], self.r_PSR.shape[2]) == (c, r)
        return together and behind and sizes and self.c_PSC.dtype == torch.bfloat16

    def descriptors(self, tokens: int) -> tuple[TensorDescriptor, ...]:
        """Of pools as one array of rows each."""
        return tuple(
            TensorDescriptor(
                x,
                [x.shape[0] * x.shape[1], x.shape[2]],
                [x.stride(1), 1],
                [tokens, block_of(x.shape[2])],
            )
            for x in (self.c_PSC, self.r_PSR)
        )


def block_of(channels: int) -> int:
    """The channels of a tile that holds so many."""
    return max(16, triton.next_power_of_2(channels))
