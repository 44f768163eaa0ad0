"""The run folder, its journal, and reading runs back."""
