import subprocess
import sys

import pytest

from etude.core.errors import StoreError
from etude.core.history import History
from etude.report.plot import render_reward_plot, write_reward_plot
from etude.report.run_report import RunReport
from tests.report.histories import epoch, history, validation

PNG = b"\x89PNG\r\n\x1a\n"


def test_the_plot_is_a_png(tmp_path):
    write_reward_plot(history([0.1, 0.3, 0.6], {0: 0.1, 3: 0.7}), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    "past",
    [
        history([]),
        history([None, 0.5]),
        history([0.5], {0: None}),
        History(
            run_id="run",
            epochs=tuple(
                epoch(n, 0.1 * n, filtered_avg_reward=0.2 * n, curriculum_percentile=0.3 + 0.1 * n)
                for n in range(4)
            ),
            validations=tuple(
                validation(n, 0.2 * n, reward_low=0.2 * n - 0.1, reward_high=0.2 * n + 0.1) for n in (0, 2, 4)
            ),
        ),
    ],
    ids=["nothing", "an epoch without rewards", "a validation without rewards", "everything"],
)
def test_any_history_can_be_drawn(past):
    assert render_reward_plot(past).startswith(PNG)


def test_a_plot_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(StoreError, match="missing"):
        write_reward_plot(history([0.1]), tmp_path / "missing" / "plot.png")


def test_the_report_draws_now_and_then_and_at_the_end(tmp_path):
    now = [0.0]
    report = RunReport(seconds_between_plots=60, clock=lambda: now[0])
    plot = tmp_path / "reward_plot.png"
    report(history([0.1]), tmp_path)
    assert not plot.exists()
    assert (tmp_path / "training_metrics.jsonl").exists()
    now[0] = 60.0
    report(history([0.1]), tmp_path)
    assert plot.exists()
    plot.unlink()
    report(history([0.1]), tmp_path, final=True)
    assert plot.exists()


def test_importing_the_report_does_not_load_matplotlib():
    code = "import sys, etude.report.run_report, etude.report.progress; print('matplotlib' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
