"""`python -m sandkasten`: hands over to the command line."""

import sys

from sandkasten.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
