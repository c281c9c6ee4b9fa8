"""Energy counters: wraps, machines without them, and stand-ins for those that have."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from perilune.telemetry.energy import Counter, EnergyMeter, find_counters


@pytest.fixture
def no_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)


@pytest.fixture
def rapl(tmp_path):
    """A folder with one package and a zone below it."""

    def zone(name: str, label: str, energy_uj: str) -> None:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "name").write_text(f"{label}\n")
        (folder / "energy_uj").write_text(energy_uj)
        (folder / "max_energy_range_uj").write_text("1000000\n")

    zone("intel-rapl:0", "package-0", "400000\n")
    zone("intel-rapl:0:0", "core", "100\n")
    return tmp_path


def test_a_counter_that_starts_again():
    readings = iter([90.0, 95.0, 5.0, 15.0])
    meter = EnergyMeter([Counter("cpu", lambda: next(readings), 100.0)])
    used = []
    for _ in range(3):
        meter.update()
        used.append(meter.used_j["cpu"])
    assert used == [5.0, 15.0, 25.0]


def test_a_counter_that_falls_without_a_reason_adds_nothing():
    readings = iter([9.0, 1.0, 2.0])
    meter = EnergyMeter([Counter("gpu", lambda: next(readings))])
    meter.update()
    meter.update()
    assert meter.used_j["gpu"] == 1.0


def test_packages_are_read_and_zones_within_them_are_not(no_nvml, rapl):
    found = find_counters(rapl)
    assert [counter.name for counter in found.counters] == ["package-0@0"]
    meter = EnergyMeter(found.counters)
    (rapl / "intel-rapl:0" / "energy_uj").write_text("100000")
    meter.update()
    assert meter.used_j["package-0@0"] == pytest.approx(0.7)
    assert found.missing == ["NVML: pynvml is not installed"]


def test_a_machine_without_counters_says_why(no_nvml, tmp_path):
    found = find_counters(tmp_path / "none")
    assert found.counters == []
    assert [why.partition(":")[0] for why in found.missing] == ["NVML", "RAPL"]


def test_a_counter_that_may_not_be_read_is_told(no_nvml, rapl, monkeypatch):
    from pathlib import Path

    read_text = Path.read_text

    def refuse(path, *args, **kwargs):
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return read_text(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", refuse)
    found = find_counters(rapl)
    assert found.counters == []
    assert "energy_uj may not be read" in found.missing[1]


def test_a_damaged_counter_is_told(no_nvml, rapl):
    (rapl / "intel-rapl:0" / "energy_uj").write_text("none")
    assert "could not convert" in find_counters(rapl).missing[1]


def fake_nvml(energies_mj, *, error: Exception | None = None):
    class NVMLError(Exception):
        pass

    def energy(index):
        if error is not None:
            raise NVMLError(str(error))
        return energies_mj[index]

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(energies_mj),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetTotalEnergyConsumption=energy,
    )


def test_every_gpu_has_its_counter(monkeypatch, tmp_path):
    energies_mj = [1000, 5000]
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(energies_mj))
    meter = EnergyMeter(find_counters(tmp_path).counters)
    energies_mj[1] += 2500
    meter.update()
    assert meter.used_j == {"gpu0": 0.0, "gpu1": 2.5}


@pytest.mark.parametrize(
    ("nvml", "why"),
    [(fake_nvml([]), "NVML: there is no GPU"), (fake_nvml([1], error=OSError("no")), "NVML: no")],
)
def test_gpus_that_do_not_count(monkeypatch, tmp_path, nvml, why):
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = find_counters(tmp_path)
    assert found.counters == []
    assert found.missing[0] == why
