"""Other processes of a run: runners, programs on Ray, and the live status of each."""
