"""`python -m plait`: the same as the command `plait`."""

from plait.cli import main

if __name__ == "__main__":
    main()
