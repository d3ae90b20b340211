"""`python -m raymoe` is the command `raymoe`."""

from raymoe.cli import main

if __name__ == "__main__":
    main()
