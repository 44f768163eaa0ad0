"""Where a run goes back to from weights that are damaged, and what it costs one that has none."""

from __future__ import annotations

from etude.core.history import History
from etude.loop.lifecycle import WayBack, way_back
from tests.report.histories import history, version


async def test_whether_the_last_version_is_whole_is_asked_of_the_last_epoch_alone(monkeypatch):
    asked, looked_at = [], []
    went_back = History.went_back
    monkeypatch.setattr(
        History, "went_back", lambda self, epoch: looked_at.append(epoch) or went_back(self, epoch)
    )

    async def damage_of(version):
        asked.append(version.number)
        return []

    assert await way_back(history([0.5] * 300), [], damage_of) is None
    assert asked == looked_at == [300]


async def test_it_goes_back_to_the_last_version_that_is_whole():
    whole = history([0.1, 0.2, 0.3, 0.4])
    after = whole.epochs[2].model_copy(update={"back_to": version(1)})

    async def damage_of(version):
        return [f"v{version.number} is missing"] if version.number > 2 else []

    lost = ("v3 is missing", "v4 is missing")
    assert await way_back(whole, [], damage_of) == WayBack(lost, 2, version(2), keeps_warm_up=True)
    went_back = await way_back(whole.with_epoch(after), [], damage_of)
    assert went_back == WayBack(("v4 is missing",), 3, version(1), keeps_warm_up=True)
