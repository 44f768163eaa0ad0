"""Problems in words, and a calculator that the model calls."""
