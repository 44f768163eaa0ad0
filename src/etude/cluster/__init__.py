"""Ray: the processes that train a job together, on the nodes of a cluster."""
