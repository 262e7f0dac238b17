"""`python -m router` is `ebbtide`."""

import sys

from router.cli import main

if __name__ == "__main__":
    sys.exit(main())
