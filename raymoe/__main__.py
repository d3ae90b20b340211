"""`python -m raymoe` is the command `raymoe`."""

import sys

from raymoe.shadows import find_shadow, first_directory

# Python looks for packages in the working directory first, those of the command too.
if __name__ == "__main__" and (shadow := find_shadow(first_directory())):
    sys.exit(f"error: {shadow}")

from raymoe.cli import main

if __name__ == "__main__":
    main()
