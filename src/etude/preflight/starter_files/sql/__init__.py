"""Questions about a shop, answered by SQL over its database: demonstrations first, rows compared."""
