"""`python -m etude` is the program `etude`."""

from etude.cli import main

if __name__ == "__main__":
    main()
