"""The Triton kernels, which `triton_quant` launches."""
