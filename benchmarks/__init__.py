"""Figures, each beside a limit measured in the same run: `make bench`."""
