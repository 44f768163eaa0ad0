"""Ray: the `cluster` block, its runners, and teams of processes that train a job on many machines."""
