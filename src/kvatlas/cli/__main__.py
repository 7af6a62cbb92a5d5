"""Run the command line with `python -m kvatlas.cli`."""

from kvatlas.cli import main

if __name__ == "__main__":
    main()
