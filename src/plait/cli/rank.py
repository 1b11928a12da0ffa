"""`python -m plait.cli.rank`: a rank that `plait` itself started, which reports to its parent."""

from plait.cli.app import PARENT_PRINTS, main

if __name__ == "__main__":
    main(PARENT_PRINTS)
