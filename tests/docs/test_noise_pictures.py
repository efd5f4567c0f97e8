"""The numbers of docs/noise-scale.md are those that tools/noise_pictures.py prints."""

import re
from pathlib import Path
from statistics import mean
from types import ModuleType

import pytest

from docs.scripts import ROOT, tool

PAGE = ROOT / "docs" / "noise-scale.md"


@pytest.fixture(scope="module")
def text() -> str:
    return " ".join(PAGE.read_text().split())


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    return tool("noise_pictures")


def test_the_clouds(pictures: ModuleType, text: str) -> None:
    early, late = (round(cloud.noise_scale) for cloud in pictures.clouds())
    assert f"noise scale is {early} samples" in text
    assert f"noise scale is {late} samples" in text


def test_the_growth(pictures: ModuleType, text: str) -> None:
    found = pictures.growth()
    stated = {epoch: f"{mean(found[epoch]):.0f}" for epoch in (1, 5, 30, 35)}
    assert all(len(scales) == 3 for scales in found.values())
    assert all(number in re.sub(r"(?<=\d)\s(?=\d{3})", "", text) for number in stated.values())


@pytest.mark.slow
def test_the_steps(pictures: ModuleType, text: str) -> None:
    found = {cost.batch_size: cost.steps for cost in pictures.costs()}
    assert f"{found[1]:.0f} at batch 1, and {round(found[16]) * 16} ({found[16]:.0f} steps) at batch 16" in text
    assert f"{found[512]:.1f} steps at 512, {found[1024]:.1f} at 1024" in text


def test_the_pictures_are_drawn(pictures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(pictures, "SIZES", (8, 64, 512))
    monkeypatch.setattr(pictures, "RATES", (0.177, 0.7, 1.0))
    pictures.main(["--out", str(tmp_path)])
    assert len([*tmp_path.glob("noise-*.svg")]) == 3
