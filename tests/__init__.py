import os

# bf16 products may kill the process where a CPU advertises AMX that cannot be used
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
