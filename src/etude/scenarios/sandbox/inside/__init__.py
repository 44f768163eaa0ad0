"""The code inside of the sandbox, before and around the untrusted code.

Nothing here imports from the rest of Etude: the process has the standard library only.
"""
