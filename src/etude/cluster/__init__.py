"""Ray: the `cluster` block, its runners and the processes that train a job together, on many machines."""
