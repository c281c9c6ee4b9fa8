"""Steps whose loss stands out of those before: they are left out, and end the run if they stay."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from torch import Tensor, nn

from perilune.core.errors import PeriluneError
from perilune.train.team import Team

WINDOW = 128
ENOUGH = 32
"""Losses without which nothing stands out."""
MOST = 10
"""Spikes one after another that a run outlives."""
_FORGET = 0.05
_SIGMA = 1.4826
"""Standard deviations in a median deviation, for a normal distribution."""


class LossSpikeError(PeriluneError):
    """The loss jumped up and stayed there; the message names the layer."""


class SpikeGuard:
    """`losses` are those of the last steps that were taken, and belong to a run's state."""

    def __init__(self, sigmas: float, losses: Sequence[float] = ()) -> None:
        """`sigmas` above the median is a spike; 0: nothing is."""
        self.sigmas = sigmas
        self.losses = deque(losses, WINDOW)
        self.num_in_a_row = 0

    def is_spike(self, loss: float) -> bool:
        """Whether to leave a step out; remembers its loss if not."""
        if self.sigmas and len(self.losses) >= ENOUGH and loss > self.bound():
            self.num_in_a_row += 1
            return True
        self.num_in_a_row = 0
        self.losses.append(loss)
        return False

    def bound(self) -> float:
        middle = median(self.losses)
        deviation = median(abs(loss - middle) for loss in self.losses)
        return middle + self.sigmas * _SIGMA * deviation


class TypicalNorms:
    """What the gradient norms of parameters have lately been."""

    def __init__(self) -> None:
        self._norms_P: Tensor | None = None

    def see(self, norms_P: Tensor) -> None:
        if self._norms_P is None or len(self._norms_P) != len(norms_P):
            self._norms_P = norms_P.clone()
        else:
            self._norms_P.lerp_(norms_P, _FORGET)

    def grown_most(self, model: nn.Module, norms_P: Tensor, team: Team) -> str:
        """The gradient that is largest beside what it has been, in a clause. Without a past (a
        resumed run's first step), the largest."""
        names = [name for name, p in model.named_parameters() if p.grad is not None]
        now = team.sum(norms_P.square())
        past = self._norms_P
        if past is None or len(past) != len(norms_P):
            return f"gradient of {names[int(now.argmax())]}, the largest one"
        before = team.sum(past.square())
        # A gradient that was next to nothing has grown by any factor.
        ratios = (now / (before + 1e-3 * before.mean())).sqrt()
        worst = int(ratios.argmax())
        return f"gradient of {names[worst]}, {float(ratios[worst]):.3g} times what it was"
