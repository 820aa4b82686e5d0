"""Limits of a machine that nobody has, with round figures."""

from headrace.bench.limits import Limits

LIMITS = Limits(
    isa="avx2",
    num_threads=2,
    read_bytes_per_s=20e9,
    read_by_one_thread_bytes_per_s=10e9,
    f32_ops_per_s=200e9,
    int4_ops_per_s=800e9,
    int8_ops_per_s=400e9,
    bf16_ops_per_s=0.0,
)
