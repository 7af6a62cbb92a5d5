"""Run every benchmark."""

from benchmarks import geometry

geometry.main()
