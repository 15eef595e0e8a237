"""`python -m vitkit` is `vitkit`."""

from vitkit.cli import main

if __name__ == "__main__":
    main()
