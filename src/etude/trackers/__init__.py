"""Where a run is shown while it goes on: readers of its journal, each on a thread of its own."""
