"""Optional integrations, each with an extra. They register themselves, and no lower package imports them."""
