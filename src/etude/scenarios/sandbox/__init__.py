"""Running untrusted code, in a process that can do almost nothing."""
