"""Run every benchmark."""

from benchmarks import geometry, planning, routes

geometry.main()
planning.main()
routes.main()
