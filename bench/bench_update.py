"""Our update after an unstored last sum, beside torch's fused AdamW on fp32 parameters."""

PASSES = ("update", "torch_fused_adamw")


def bench_update(params, m, stage, measurements, replay):
    replay(measurements.stages(params, m)[stage])
