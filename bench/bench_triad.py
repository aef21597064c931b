"""The better of two triads: what the other rows of the same turns are a share of."""

PASSES = ("triad",)


def bench_triad(params, m, stage, measurements, replay):
    replay(measurements.stages(params, m)[stage])
