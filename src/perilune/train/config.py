"""What a training run is made of, as one frozen value. Recipes are functions that return it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any

from perilune.core.errors import ConfigError

BALANCE_RULES = ("quantile", "sign", "auxiliary", "none")
SCHEDULES = ("wsd", "cosine")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    peak_lr: float = 2e-3
    """For both optimisers: Muon's update is scaled to AdamW's root mean square."""
    warmup_steps: int = 100
    schedule: str = "wsd"
    """wsd: constant, then a linear fall; or cosine (K3)."""
    decay_ratio: float = 0.25
    """Of wsd: share of the steps, the last ones, in which the rate falls."""
    final_lr_ratio: float = 0.0
    """The rate at the end over `peak_lr`."""
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0
    muon_momentum: float = 0.95
    muon_per_head: bool = True
    """Whether Muon takes queries, keys and values head by head (K3)."""
    adam_betas: tuple[float, float] = (0.9, 0.95)
    qk_clip: float = 0.0
    """The largest logit that MLA's heads may have (`qk_clip`; K2: 100); 0: nobody watches.
    Watching costs each MLA layer one more product of queries and keys."""

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigError(
                f"optim.schedule is {self.schedule!r}; there is: {', '.join(SCHEDULES)}"
            )


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """How experts are kept evenly loaded (`balance.rules`)."""

    rule: str = "quantile"
    """quantile (K3), sign (DeepSeek-V3), auxiliary (a loss), or none."""
    bins: int = 1000
    """Of a histogram. A quantile that is read from it is off by no more than a bin, which is
    2/`bins` and what the biases span over `bins` wide."""
    sign_rate: float = 1e-3
    """Step of the sign rule."""
    auxiliary_weight: float = 1e-2

    def __post_init__(self) -> None:
        if self.rule not in BALANCE_RULES:
            raise ConfigError(
                f"balance.rule is {self.rule!r}; there is: {', '.join(BALANCE_RULES)}"
            )
        if self.bins < 2:
            raise ConfigError(f"balance.bins is {self.bins}: a histogram has two or more")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    name: str
    model: Mapping[str, Any]
    """A `config.json` object."""
    data_dir: str
    tokenizer_dir: str
    """Holds the tokenizer that the data is encoded with; its files go into the checkpoint."""
    mixture: Mapping[str, float]
    """Share of tokens of each kind of shard."""
    out_dir: str
    steps: int
    row_len: int = 1024
    rows: int = 128
    """Rows of one step."""
    qat_from: float = 0.5
    """Share of the steps after which the experts' weights pass through MXFP4 in the forward."""
    seed: int = 0
    device: str = "cpu"
    compute_dtype: str = "float32"
    """Of the activations; weights and updates are fp32."""
    compile: bool = False
    micro_batches: int = 1
    """Parts of a step's rows, one after another: less memory for activations, the same step."""
    recompute: bool = False
    """Activation checkpointing: of every layer only the input is kept for the backward pass."""
    spike_sigmas: float = 0.0
    """A step is left out whose loss is that many standard deviations above the median of those
    before; 10 meets nothing but accidents. 0: none is."""
    expert_ranks: int = 1
    """Ranks that share out the routed experts; the other parameters are everybody's."""
    threads: int = 0
    """Torch threads; 0: torch's choice."""
    eval_every: int = 500
    """Steps between validations, of which one follows the last step; 0: none at all."""
    save_every: int = 1000
    log_every: int = 10
    optim: OptimConfig = field(default_factory=OptimConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.row_len

    def on(self, device: str) -> TrainConfig:
        """The same run on `device`; a CPU computes in fp32 and is not worth a compiler."""
        if device != "cpu":
            return replace(self, device=device)
        return replace(self, device=device, compute_dtype="float32", compile=False)

    def as_json(self) -> dict[str, Any]:
        """As it comes back from a JSON file."""
        return json.loads(json.dumps(asdict(self)))


PLACES = ("data_dir", "tokenizer_dir", "out_dir", "threads", "expert_ranks")
"""Keys that may change between the pieces of a run."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One phrase for each key, by its path, that two recipes (as JSON) do not share. What there was
    no key for at the time had the value that is the default, or, inside of another, was off."""
    return _differences({**_defaults(), **before}, now, "")


def _defaults() -> dict[str, Any]:
    values = {f.name: f.default for f in fields(TrainConfig) if f.default is not MISSING}
    return values | {"balance": asdict(BalanceConfig())}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str) -> list[str]:
    found = []
    for key in sorted((before.keys() | now.keys()) - set(PLACES)):
        old, new = before.get(key, "unset"), now.get(key, "unset")
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{path}{key}.")
        elif old != new and (new or key in before):
            found.append(f"{path}{key} was {old}, is {new}")
    return found
