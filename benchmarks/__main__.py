"""Run every benchmark."""

from benchmarks import (
    converting,
    fleet,
    geometry,
    handing_over,
    kernels,
    planning,
    pool,
    pulling,
    routes,
    store_scale,
    tier,
    tls_wire,
    wires,
)

geometry.main()
planning.main()
pool.main()
routes.main()
converting.main()
kernels.main()
tier.main()
fleet.main()
store_scale.main()
wires.main()
tls_wire.main()
handing_over.main()
pulling.main()
