"""The program `etude`, started as `python -m etude`."""

from etude.cli import main

if __name__ == "__main__":
    main()
