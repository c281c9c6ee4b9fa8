"""fla-core and FlashKDA as backends of `kda_chunk`: called as they want to be, or refused."""

from __future__ import annotations

import peer_stand_ins
import pytest
import torch

from perilune.core.errors import UnsupportedError
from perilune.kernels import plugins as registered
from perilune.kernels.common.packing import Packing
from perilune.kernels.kda import peers, plugins
from perilune.kernels.kda.bench_cases import sequences
from perilune.kernels.kda.reference import kda_chunk
from perilune.kernels.plugins import Registered, find, within_limits
from perilune.kernels.testing import relative_error

BOTH = {"fla": plugins.fla_chunk, "flash_kda": plugins.flash_kda}
both = pytest.mark.parametrize("name", BOTH)


def inputs(lengths=(17, 2), width=128, dtype=torch.float32):
    return sequences(lengths, 2, width)(torch.Generator().manual_seed(3), dtype)


@pytest.mark.usefixtures("kda_peers")
@both
@pytest.mark.parametrize("lengths", [(17, 2), (9, 9), (5,)])
@pytest.mark.parametrize("with_state", [True, False])
def test_they_are_the_op(name, lengths, with_state):
    x = inputs(lengths) | ({} if with_state else {"state_NHKV": None})
    got, want = BOTH[name](*x.values()), kda_chunk(**x)
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(got[:2], want[:2], strict=True))
    assert got.state_NHKV.dtype == torch.float32


@pytest.mark.usefixtures("kda_peers")
@both
def test_parameters_and_states_in_bf16_are_widened(name):
    """The checklist draws every input in one dtype, and both packages want these in fp32."""
    wide = inputs()
    names = ("A_log_H", "dt_bias_HK", "state_NHKV")
    x = wide | {each: wide[each].bfloat16() for each in names}
    got, want = BOTH[name](**x), kda_chunk(**x)
    assert all(relative_error(a, b) < 1e-6 for a, b in zip(got[:2], want[:2], strict=True))


@pytest.mark.usefixtures("kda_peers")
def test_more_rows_than_a_grid_takes_go_in_as_one(monkeypatch):
    monkeypatch.setattr(peers, "MAX_GRID", 5)
    for count, rows in ((2, 2), (3, 1)):
        x = inputs((4,) * count)
        got, want = plugins.fla_chunk(**x), kda_chunk(**x)
        assert all(relative_error(a, b) < 1e-6 for a, b in zip(got[:2], want[:2], strict=True))
        assert peer_stand_ins.called[-1]["q"].shape[0] == rows


@pytest.mark.usefixtures("kda_peers")
def test_fla_gives_every_gradient():
    grads = []
    for run in (plugins.fla_chunk, kda_chunk):
        x = inputs()
        leaves = [t.requires_grad_() for t in x.values() if isinstance(t, torch.Tensor)]
        out = run(**x)
        loss = out.o_THV.square().sum() + out.state_NHKV.sum()
        grads.append(torch.autograd.grad(loss, leaves))
    assert all(relative_error(a, b) < 1e-5 for a, b in zip(*grads, strict=True))
    assert len(grads[0]) == 8


REFUSED = {
    "segmented rows": {"packing": Packing.rows(torch.tensor([[0] * 9 + [1] * 10]))},
    "without a token": {"packing": Packing(lengths=(19, 0))},
    "no cuts": {"cuts": ((5,), ())},
    "not by nothing": {"lower_bound": None},
    "not by -6": {"lower_bound": -6.0},
    "not by 0": {"lower_bound": 0.0},
}


@pytest.mark.usefixtures("kda_peers")
@both
@pytest.mark.parametrize("said", REFUSED)
def test_what_they_cannot_do_is_refused(name, said):
    with pytest.raises(UnsupportedError, match=said):
        BOTH[name](**inputs() | REFUSED[said])
    assert peer_stand_ins.called == []


@pytest.mark.usefixtures("kda_peers")
@pytest.mark.parametrize(("name", "width"), [("fla", 7), ("fla", 60), ("flash_kda", 64)])
def test_other_widths_are_refused(name, width):
    with pytest.raises(UnsupportedError, match=f"not K={width} V={width}"):
        BOTH[name](**inputs(width=width))


@pytest.mark.usefixtures("kda_peers")
def test_flash_kda_refuses_whatever_needs_a_gradient():
    run = within_limits(plugins.flash_kda, find("kda_chunk", "flash_kda"))
    x = inputs(dtype=torch.bfloat16)
    x["v_THV"].requires_grad_()
    with pytest.raises(UnsupportedError, match="forward only"):
        run(**x)
    with torch.no_grad():
        assert run(**x).o_THV.dtype == torch.bfloat16


@both
def test_they_are_declared_for_a_gpu_and_not_checked_without_their_package(monkeypatch, name):
    versions = {"fla-core": "0.6.0", "flash_kda": "0.0.1"}
    monkeypatch.setattr(registered, "version_of", versions.get)
    found = find("kda_chunk", name)
    assert isinstance(found, Registered)
    assert found.version == versions[found.distribution]
    assert found.plugin.devices == ("cuda",)
    assert found.plugin.gradients == (name == "fla")
