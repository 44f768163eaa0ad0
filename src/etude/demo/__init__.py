"""The demo: a tiny model is made, learns a task, and is measured before and after."""
