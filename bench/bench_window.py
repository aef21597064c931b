"""Whole windows: ours beside stock torch, plain torch, torch.compile, and other packages where they are installed."""


def bench_window(params, k, path, measurements, replay):
    replay(measurements.windows(params, k)[path])
