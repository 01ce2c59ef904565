"""`python -m mpcomp`, which is the command `mpcomp`."""

from mpcomp.command.main import main

if __name__ == "__main__":
    main()
