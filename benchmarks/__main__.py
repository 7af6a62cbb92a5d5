"""Run every benchmark."""

from benchmarks import geometry, kernels, planning, routes, tier

geometry.main()
planning.main()
routes.main()
kernels.main()
tier.main()
