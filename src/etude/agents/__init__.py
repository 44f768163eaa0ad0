"""The agents of a run: workflows, the recording of their calls, and the scores of their episodes."""
