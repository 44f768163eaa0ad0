import pytest

from etude.core.errors import install_command
from etude.core.history import History
from etude.report.files import RunReport, render_reward_plot
from tests.report.histories import epoch, history, validation

PNG = b"\x89PNG\r\n\x1a\n"


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


def test_without_matplotlib_a_run_goes_on_and_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr("etude.report.files.find_spec", lambda name: None)
    messages = []
    report = RunReport(tell=messages.append)
    report(history([0.1]), tmp_path)
    report(history([0.1, 0.2]), tmp_path, final=True)
    assert (tmp_path / "training_metrics.jsonl").read_text().count("\n") == 2
    assert not (tmp_path / "reward_plot.png").exists()
    assert messages == [
        "there is no reward_plot.png: drawing the plot of the rewards needs the extra 'plots'. "
        f"Install it: {install_command('plots')}"
    ]
