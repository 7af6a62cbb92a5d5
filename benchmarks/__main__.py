"""Run every benchmark."""

from benchmarks import geometry, kernels, planning, routes

geometry.main()
planning.main()
routes.main()
kernels.main()
