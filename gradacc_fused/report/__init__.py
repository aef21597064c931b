"""Measuring and showing: what the benchmark, the demo and ``gradacc-fused bench`` share. Nothing else imports it."""
