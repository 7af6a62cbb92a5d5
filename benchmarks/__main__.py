"""Run every benchmark."""

from benchmarks import geometry, planning

geometry.main()
planning.main()
