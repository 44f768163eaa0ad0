"""The view: runs, episodes and tokens in a browser, read from run folders while they are written."""
