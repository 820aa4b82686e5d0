"""The CPU backend in C++: fused kernels (AVX2, AVX-512, plain C++), a thread pool, the sampler.

Decides how a step is computed on a CPU, with the same bits whatever the batch, the thread count
and the instruction set; refuses to know which model is computed and who asked.
"""

from headrace.core.kv.names import name_with
from headrace.core.router.replicas import replicas_with
from headrace.ops.native._native import Replicas, block_names, can_name_blocks

if can_name_blocks():
    name_with(block_names)
replicas_with(Replicas)
