"""The pictures of measurements say how to read them, and name stages as the README does."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from processes import ROOT


@pytest.mark.parametrize("measured", sorted((ROOT / "docs" / "measured").glob("*.json")), ids=lambda file: file.stem)
def test_pictures_are_drawn_from_what_was_measured(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from redraw import redraw

    drawn: list[str] = []
    save = Figure.savefig

    def saved(figure: Figure, file: Path, **how: object) -> None:
        drawn.extend(one.get_text() for one in figure.findobj(Text))
        save(figure, file, dpi=10)

    monkeypatch.setattr(Figure, "savefig", saved)
    redraw(Path(shutil.copy(measured, tmp_path)))
    assert (tmp_path / f"{measured.stem}.png").stat().st_size
    said = " ".join(" ".join(drawn).split())
    assert "lower is better" in said and "2 ranks" in said.replace("4 ranks", "2 ranks")
    for number, name in enumerate(["DDP", "OSS", "ShardedDDP", "FSDP"]):
        assert f"stage {number} {name}" in said.replace(",", "")
