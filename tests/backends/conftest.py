import pytest

from etude.backends.openai_jobs import OpenAiJobs
from etude.wire.retries import RetryPolicy


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    """Clients that hardly wait before they send a request again."""
    monkeypatch.setattr(OpenAiJobs, "retry_policy", RetryPolicy(first_wait=0.001))
