"""`python -m kvatlas`: the command line."""

from kvatlas.cli import main

if __name__ == "__main__":
    main()
